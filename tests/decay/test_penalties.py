"""Decay inside the backward pass, other penalties on the product, and dropping its entries."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import factorized as fz
from factorized.formats.kernel import KernelShape, to_matrix
from factorized.testing import error
from tests.decay.models_for_decay import (
    STRENGTH,
    by_weights,
    difference,
    layers,
    loss_of,
    mixed,
    shaken,
    train,
    twins,
)

Penalty = Callable[[nn.Module], Any]


def half_square(W: Tensor) -> Tensor:
    return STRENGTH / 2 * W.square().sum()


def l1(W: Tensor) -> Tensor:
    return 0.1 * W.abs().sum()


def composing() -> nn.Module:
    """Return a model half of whose layers compose their weight to run."""
    model = mixed()
    model.conv.execution = model.grouped.execution = "composed"
    model.deep.execution = model.wide.execution = model.up[0].execution = "composed"
    model.up[1].execution = "chain"
    return model


class TestInBackward:
    def test_a_step_equals_that_of_the_attached_decay(self) -> None:
        model, reference = composing(), composing()
        for twin, inside in ((model, True), (reference, False)):
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
            fz.FrobeniusDecay(twin, STRENGTH, in_backward=inside).attach(optimizer)
            train(twin, optimizer, range(3))
        assert difference(model, reference) < 1e-10
        assert difference(model, mixed()) > 1e-2

    def test_the_backward_pass_itself_decays_the_layers_that_compose(self) -> None:
        model, plain = composing(), composing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        decay = fz.FrobeniusDecay(model, {"*": 0.1, "conv": 0.5}, in_backward=True).attach(optimizer)
        for twin in (model, plain):
            loss_of(twin, 0).backward()
        expected = {"conv": 0.5, "grouped": 0.5, "deep": 0.1, "wide": 0.1, "up.0": 0.1}
        for name, layer in layers(model).items():
            other = layers(plain)[name]
            decays = torch.autograd.grad(expected.get(name, 0.0) / 2 * other.weight.square().sum(), other.factors)
            for actual, factor, added in zip(layer.factors, other.factors, decays, strict=True):
                assert error(actual.grad, factor.grad + added) < 1e-10
        decay.detach()
        model.zero_grad()
        loss_of(model, 0).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)

    def test_overcomplete_layers_run_composed_and_so_decay_in_backward(self) -> None:
        dense = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6, 5))
        model = fz.factorize(dense, fz.Overcomplete("wide"), keep_first_and_last=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fz.FrobeniusDecay(model, STRENGTH, in_backward=True).attach(optimizer)
        assert [layer.decay_in_backward for layer in layers(model).values()] == [STRENGTH] * 2

    @pytest.mark.parametrize(
        ("strength", "decoupled"), [(STRENGTH, True), (lambda step: STRENGTH, False)], ids=["decoupled", "schedule"]
    )
    def test_what_it_cannot_do_is_refused(self, strength: Any, decoupled: bool) -> None:
        with pytest.raises(ValueError, match=r"no schedule, no decoupled=True"):
            fz.FrobeniusDecay(composing(), strength, decoupled=decoupled, in_backward=True)

    @pytest.mark.parametrize(
        "again",
        [
            lambda model: fz.FrobeniusDecay(model, STRENGTH).attach(torch.optim.SGD(model.parameters(), lr=0.1)),
            lambda model: fz.Flambe(model.parameters(), model),
        ],
        ids=["frobenius", "flambe"],
    )
    def test_a_second_decay_is_refused_with_any_optimizer_until_the_first_is_detached(
        self, again: Callable[[nn.Module], object]
    ) -> None:
        model = composing()
        decay = fz.FrobeniusDecay(model, STRENGTH, in_backward=True)
        decay.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match=r"in_backward=True already decays 'conv', .*call the detach\(\) of that"):
            again(model)
        fz.NuclearDecay(model, STRENGTH).attach(torch.optim.SGD(model.parameters(), lr=0.1))  # another penalty
        decay.detach()
        again(model)

    def test_truncated_layers_are_not_decayed_until_a_new_decay_is_attached(self) -> None:
        model = composing()
        fz.FrobeniusDecay(model, STRENGTH, in_backward=True).attach(torch.optim.SGD(model.parameters(), lr=0.1))
        fz.truncate(model, rank=1)
        plain = deepcopy(model)  # copies are not decayed
        for twin in (model, plain):
            loss_of(twin, 0).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert error(one.grad, other.grad) < 1e-10
        fz.FrobeniusDecay(model, STRENGTH).attach(torch.optim.SGD(model.parameters(), lr=0.1))

    def test_acting_by_hand_is_refused(self) -> None:
        with pytest.raises(ValueError, match="attach it instead"):
            fz.FrobeniusDecay(composing(), STRENGTH, in_backward=True).apply_()


PENALTIES = [
    pytest.param(lambda m: fz.ProductPenalty(m, l1), l1, id="l1"),
    pytest.param(lambda m: fz.ProductPenalty(m, half_square), half_square, id="squared-norm"),
    pytest.param(lambda m: fz.NuclearDecay(m, 0.2), lambda W: 0.2 * torch.linalg.svdvals(W).sum(), id="nuclear"),
]


@pytest.mark.parametrize(("make", "fn"), PENALTIES)
class TestProductPenalty:
    def total(self, model: nn.Module, fn: Callable[[Tensor], Tensor]) -> Tensor:
        return sum((fn(to_matrix(layer.weight, layer.shape)) for layer in layers(model).values()), torch.zeros(()))

    def test_it_adds_the_gradient_of_its_penalty(self, make: Penalty, fn: Callable[[Tensor], Tensor]) -> None:
        model, reference = twins()
        penalty = make(model)
        assert error(penalty.penalty(), self.total(reference, fn)) < 1e-10
        for twin in (model, reference):
            loss_of(twin, 0).backward()
        penalty.apply_()
        by_penalty = torch.autograd.grad(penalty.penalty(), [f.parameter for s in penalty.forms for f in s.factors])
        self.total(reference, fn).backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert error(one.grad, other.grad) < 1e-8
        factors = [factor for layer in layers(reference).values() for factor in layer.factors]
        fresh = torch.autograd.grad(self.total(reference, fn), factors)
        for actual, expected in zip(by_penalty, fresh, strict=True):
            assert error(actual, expected) < 1e-8

    def test_attached_it_equals_the_penalty_in_the_loss(self, make: Penalty, fn: Callable[[Tensor], Tensor]) -> None:
        model, reference = twins()
        optimizer, plain = (torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9) for twin in (model, reference))
        penalty = make(model)
        assert penalty.attach(optimizer) is penalty
        train(model, optimizer, range(2))
        train(reference, plain, range(2), penalty=lambda: self.total(reference, fn))
        assert difference(model, reference) < 1e-8
        penalty.detach()
        train(model, optimizer, range(2))
        train(reference, plain, range(2))
        assert difference(model, reference) < 1e-8

    def test_a_closure_sees_it(self, make: Penalty, fn: Callable[[Tensor], Tensor]) -> None:
        model, reference = twins()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        make(model).attach(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        plain = torch.optim.SGD(reference.parameters(), lr=0.05)
        train(reference, plain, (0, 0), penalty=lambda: self.total(reference, fn))
        assert difference(model, reference) < 1e-10

    def test_a_fused_optimizer_unscales_it_with_the_gradients(self, make: Penalty, fn: Any) -> None:
        def run(model: nn.Module, fused: bool) -> nn.Module:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
            make(model).attach(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(loss_of(model, 0)).backward()
            scaler.step(optimizer)
            return model

        model, reference = twins()
        assert difference(run(model, fused=True), run(reference, fused=False)) < 1e-10

    def test_a_factor_of_another_optimizer_or_frozen_is_left_alone(self, make: Penalty, fn: Any) -> None:
        model, plain = twins()
        model.wide.U.requires_grad_(False)
        for twin in (model, plain):
            loss_of(twin, 0).backward()
        optimizer = torch.optim.SGD([model.wide.U, model.wide.V, model.deep.U], lr=0.0)
        make(model).attach(optimizer)
        optimizer.step()
        changed = {
            name
            for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True)
            if one.grad is not None and not torch.equal(one.grad, other.grad)
        }
        assert {"wide.V", "deep.U"} <= changed
        assert not changed & {"deep.V", "conv.U", "up.0.U"}
        assert model.wide.U.grad is None


def test_nuclear_decay_of_half_parameters_is_computed_in_single_precision() -> None:
    model = mixed().bfloat16()
    wide = deepcopy(model).float()
    for twin in (model, wide):
        for parameter in twin.parameters():
            parameter.grad = torch.zeros_like(parameter)
        fz.NuclearDecay(twin, 0.2).apply_()
    assert error(model.up[0].U.grad, wide.up[0].U.grad) < 3e-3
    assert error(fz.NuclearDecay(model, 0.2).penalty(), fz.NuclearDecay(wide, 0.2).penalty()) < 1e-5


LINEAR = (fz.FactorizedLinear(50, 40, 4, bias=False), torch.eye(50))
EMBEDDING = (fz.FactorizedEmbedding(50, 40, 4), torch.arange(50))
CONV = (fz.FactorizedConv2d(50, 40, 1, 4, bias=False, execution="chain"), torch.eye(50)[..., None, None])


@pytest.mark.parametrize(("layer", "x"), [LINEAR, EMBEDDING, CONV], ids=["linear", "embedding", "conv"])
class TestDropConnect:
    """The input is made to read every entry of the weight once."""

    def test_in_training_entries_of_the_product_are_dropped_and_the_others_scaled_up(
        self, layer: nn.Module, x: Tensor
    ) -> None:
        torch.manual_seed(0)
        model = fz.drop_connect(shaken(deepcopy(nn.Sequential(layer)), torch.float32), 0.3)
        whole, dropped = model.eval()(x), model.train()(x)
        kept = dropped != 0
        assert 0.25 < 1 - kept.float().mean().item() < 0.35
        assert error(dropped[kept], whole[kept] / 0.7) < 1e-5
        assert error(torch.stack([model(x) for _ in range(300)]).mean(0), whole) < 0.1

    def test_a_seed_repeats_the_draw(self, layer: nn.Module, x: Tensor) -> None:
        model = fz.drop_connect(deepcopy(nn.Sequential(layer)), 0.5)
        draws = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            draws.append(model(x))
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])

    def test_evaluation_and_a_share_of_zero_leave_the_layer_as_it_was(self, layer: nn.Module, x: Tensor) -> None:
        plain = deepcopy(nn.Sequential(layer))
        model = fz.drop_connect(deepcopy(plain), 0.5)
        assert not torch.equal(model(x), plain(x))
        assert torch.equal(model.eval()(x), plain(x))
        assert torch.equal(fz.drop_connect(model.train(), 0)(x), plain(x))


def test_decay_in_backward_and_dropped_entries_go_together() -> None:
    def gradient(decayed: bool) -> Tensor:
        model = fz.drop_connect(composing(), 0.5)
        optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if decayed:
            fz.FrobeniusDecay(model, {"wide": STRENGTH}, in_backward=True).attach(optimizer)
        torch.manual_seed(0)
        loss_of(model, 0).backward()
        return model.wide.U.grad

    model = composing()
    expected = torch.autograd.grad(by_weights(model), model.wide.U)[0]
    assert error(gradient(decayed=True) - gradient(decayed=False), expected) < 1e-10


def test_a_nuclear_decay_takes_another_strength() -> None:
    train = fz.TensorTrain().at_rank(KernelShape.of((8, 8)), 2)
    model = nn.Sequential(fz.FactorizedLinear(8, 8, 2), fz.FactorizedLinear(8, 8, train)).double()
    decay = fz.NuclearDecay(model, 0.1)
    decay.strength = 0.5
    assert error(deepcopy(decay).penalty(), fz.NuclearDecay(model, 0.5).penalty()) < 1e-12


@pytest.mark.parametrize("nuclear_first", [True, False])
def test_penalties_of_two_kinds_can_act_on_the_same_factors(nuclear_first: bool) -> None:
    model = nn.Sequential(fz.FactorizedLinear(9, 7, 2).double())
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.0), lr=0.1)
    penalties = [fz.NuclearDecay(model, 0.1), fz.ProductPenalty(model, lambda W: W.square().sum())]
    for penalty in penalties if nuclear_first else penalties[::-1]:
        penalty.attach(optimizer)
    expected = torch.autograd.grad(penalties[0].penalty() + penalties[1].penalty(), model[0].U)[0]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model[0].U.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spoil", ["zero", "lacks rank", "square identity"])
def test_the_nuclear_penalty_is_differentiable_where_factors_lack_rank(spoil: str) -> None:
    model = mixed()
    with torch.no_grad():
        if spoil == "zero":
            model.up[0].U.zero_()
        elif spoil == "lacks rank":
            model.wide.U[:, 3:] = 0
        else:
            for factor in model.wide.factors:
                factor.copy_(torch.eye(*factor.shape))
    decay = fz.NuclearDecay(model, STRENGTH)
    expected = STRENGTH * sum(
        torch.linalg.svdvals(to_matrix(layer.weight, layer.shape)).sum() for layer in layers(model).values()
    )
    assert error(decay.penalty(), expected) < 1e-10
    decay.penalty().backward()
    by_autograd = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decay.apply_()
    for name, parameter in model.named_parameters():
        if name in by_autograd:
            assert parameter.grad.isfinite().all()
            torch.testing.assert_close(by_autograd[name], parameter.grad, rtol=1e-10, atol=1e-12)
