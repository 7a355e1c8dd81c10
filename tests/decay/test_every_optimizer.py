"""Every optimizer of torch, and what they do to the sign, the learning rate and the loss."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from pytorch_optimizer import SAM
from torch import Tensor, nn
from torch.optim import Optimizer

import factorized as fz
from factorized.testing import error
from tests.decay.models_for_decay import STRENGTH, by_weights, difference, layers, loss_of, mixed, train, twins

Make = Callable[[Any], Optimizer]
MAKERS: dict[str, Callable[..., Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adagrad",
        "RMSprop",
        "Adadelta",
        "Adamax",
        "ASGD",
        "Rprop",
        "Adafactor",
    )
}


def optimizer_of(name: str, model: nn.Module, maximize: bool) -> Optimizer:
    options = {} if name == "Rprop" else {"weight_decay": 0.0}
    return MAKERS[name](model.parameters(), lr=0.01, maximize=maximize, **options)


class Small(nn.Module):
    """Nothing here has a gradient of zero, whose rounding some optimizers blow up; without bias, as Muon takes it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = fz.FactorizedLinear(7, 9, 2, bias=bias)
        self.second = fz.FactorizedLinear(9, 7, 2, bias=bias, depth=1)
        self.third = fz.FactorizedLinear(7, 4, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def small_twins(bias: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Small(bias).double()
    return model, deepcopy(model)


def train_small(model: nn.Module, optimizer: Optimizer, penalty: Callable[[], Tensor] | None = None) -> None:
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - 1).square().mean()
        (loss if penalty is None else loss + penalty()).backward()
        optimizer.step()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_with_every_optimizer_it_equals_the_penalty_in_what_is_optimized(name: str, maximize: bool) -> None:
    model, reference = small_twins(bias=True)
    optimizer, plain = (optimizer_of(name, twin, maximize) for twin in (model, reference))
    fz.FrobeniusDecay(model, STRENGTH, decoupled=False).attach(optimizer)
    train_small(model, optimizer)
    sign = -1 if maximize else 1
    train_small(reference, plain, penalty=lambda: sign * by_weights(reference))
    assert difference(model, reference) < 1e-8


def test_lamb_clips_an_attached_decay_with_the_gradients_like_a_penalty_in_the_loss() -> None:
    model, reference = small_twins(bias=True)
    optimizer, plain = (
        fz.Lamb(twin.parameters(), lr=0.01, eps=0.1, weight_decay=0.0, max_grad_norm=1e-2)
        for twin in (model, reference)
    )
    fz.FrobeniusDecay(model, STRENGTH, decoupled=False).attach(optimizer)
    train_small(model, optimizer)
    train_small(reference, plain, penalty=lambda: by_weights(reference))
    assert difference(model, reference) < 1e-8


def test_muon_is_told_which_groups_to_use_and_then_equals_the_penalty_in_the_loss() -> None:
    model, reference = small_twins(bias=False)
    with pytest.raises(ValueError, match=r"weight_decay=0\.1\), so they would be decayed twice"):
        fz.FrobeniusDecay(model, STRENGTH).attach(torch.optim.Muon(model.parameters()))
    optimizer, plain = (torch.optim.Muon(fz.parameter_groups(twin, 0.1), lr=0.1) for twin in (model, reference))
    fz.FrobeniusDecay(model, STRENGTH, decoupled=False).attach(optimizer)
    train_small(model, optimizer)
    train_small(reference, plain, penalty=lambda: by_weights(reference))
    assert difference(model, reference) < 1e-8


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_run_that_maximizes_equals_the_unscaled_one(fused: bool) -> None:
    model, reference = twins()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1, maximize=True, fused=fused) for m in (model, reference))
    fz.FrobeniusDecay(model, STRENGTH, decoupled=False).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    train(reference, plain, range(2), penalty=lambda: -by_weights(reference))
    assert difference(model, reference) < 1e-7


def test_only_the_groups_that_maximize_turn_the_sign() -> None:
    model = mixed()
    up = [factor for layer in model.up for factor in layer.factors]
    others = [p for p in model.parameters() if all(p is not q for q in up)]
    optimizer = torch.optim.SGD([{"params": up, "maximize": True}, {"params": others}], lr=0.1)
    fz.FrobeniusDecay(model, STRENGTH, decoupled=False).attach(optimizer)
    factors = [factor for layer in layers(model).values() for factor in layer.factors]
    before = [factor.detach().clone() for factor in factors]
    units = torch.autograd.grad(by_weights(model), factors)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for factor, old, unit in zip(factors, before, units, strict=True):
        assert error(factor, old - 0.1 * unit) < 1e-12


@pytest.mark.parametrize(
    "penalty",
    [lambda m: fz.NuclearDecay(m, 0.1), lambda m: fz.ProductPenalty(m, lambda W: W.abs().sum())],
    ids=["nuclear", "product"],
)
def test_other_penalties_shrink_the_products_of_what_maximizes_too(penalty: Callable[[nn.Module], Any]) -> None:
    model = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, maximize=True)
    attached = penalty(model).attach(optimizer)
    before = attached.penalty().item()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert attached.penalty().item() < before


def test_inside_the_backward_pass_what_maximizes_is_refused_and_nothing_attached() -> None:
    model = mixed()
    model.wide.execution = "composed"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    with pytest.raises(ValueError, match=r"the optimizer maximizes; use in_backward=False"):
        fz.FrobeniusDecay(model, STRENGTH, in_backward=True).attach(optimizer)
    assert model.wide.decay_in_backward == 0
    assert not optimizer._optimizer_step_pre_hooks


def test_a_decoupled_decay_adds_nothing_to_the_losses_of_a_line_search() -> None:
    model, reference = small_twins(bias=True)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    fz.decoupled_frobenius(optimizer, model, STRENGTH)
    x = torch.randn(5, 7, dtype=torch.float64)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) == (reference(x) - 1).square().mean()


@pytest.mark.parametrize("penalty", ["frobenius", "product"])
def test_a_line_search_compares_losses_with_the_penalty_in_them(penalty: str) -> None:
    def run(model: nn.Module, decayed: bool) -> float:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")
        if decayed and penalty == "frobenius":
            fz.FrobeniusDecay(model, STRENGTH, decoupled=False).attach(optimizer)
        elif decayed:
            fz.ProductPenalty(model, lambda W: STRENGTH / 2 * W.square().sum()).attach(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0) if decayed else loss_of(model, 0) + by_weights(model)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(2)][-1]

    model, reference = twins()
    assert run(model, decayed=True) == pytest.approx(run(reference, decayed=False), rel=1e-8)
    assert difference(model, reference) < 1e-6


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("steps_by_hand", [False, True])
def test_sharpness_aware_minimization_takes_the_decay_with_its_inner_step(decoupled: bool, steps_by_hand: bool) -> None:
    model, reference = small_twins(bias=True)
    rate, rho = 0.1, 0.05
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=rate, rho=rho, weight_decay=0.0)
    fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(optimizer)

    def closure(twin: nn.Module) -> Tensor:
        twin.zero_grad()
        loss = (twin(torch.ones(5, 7, dtype=torch.float64)) - 1).square().mean()
        loss.backward()
        return loss

    closure(model)
    if steps_by_hand:
        optimizer.first_step(zero_grad=True)
        closure(model)
        optimizer.second_step(zero_grad=True)
    else:
        optimizer.step(lambda: closure(model))

    parameters = list(reference.parameters())
    before = [p.detach().clone() for p in parameters]
    of_decay = torch.autograd.grad(by_weights(reference), parameters, materialize_grads=True)
    closure(reference)
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    with torch.no_grad():
        for p in parameters:
            p += rho * p.grad / norm
    closure(reference)
    with torch.no_grad():
        for p, old, decay in zip(parameters, before, of_decay, strict=True):
            p.copy_(old - rate * (p.grad + decay))
    assert difference(model, reference) < 1e-8  # the optimizer takes the norm in float32


class WithoutRate(Optimizer):
    """Knows its learning rate otherwise, as some optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(0.1 * parameter.grad)


def test_an_optimizer_without_a_learning_rate_in_its_groups_takes_a_coupled_decay() -> None:
    model, reference = twins()
    optimizer = WithoutRate(model.parameters())
    fz.FrobeniusDecay(model, STRENGTH, decoupled=False).attach(optimizer)
    train(model, optimizer, range(2))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(2), penalty=lambda: by_weights(reference))
    assert difference(model, reference) < 1e-12


def test_a_decoupled_decay_without_a_learning_rate_says_what_to_do() -> None:
    model = mixed()
    optimizer = WithoutRate(model.parameters())
    fz.decoupled_frobenius(optimizer, model, STRENGTH)
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match=r"has no 'lr'; use decoupled=False, or call apply_\(lr=\.\.\.\)"):
        optimizer.step()
