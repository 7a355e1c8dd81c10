"""What copies of models, decays and optimizers carry, and what excludes each other on one optimizer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from tests.decay.models_for_decay import STRENGTH, by_weights, difference, loss_of, mixed, train, twins

DECAYS: dict[str, Callable[[nn.Module], Any]] = {
    "frobenius": lambda m: fz.FrobeniusDecay(m, STRENGTH, decoupled=False),
    "product": lambda m: fz.ProductPenalty(m, torch.sum),
}


@pytest.mark.parametrize("make", DECAYS.values(), ids=DECAYS)
def test_a_copied_decay_is_attached_to_nothing_and_acts_on_the_copied_model(make: Callable[[nn.Module], Any]) -> None:
    model = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = make(model).attach(optimizer)
    other_model, other_optimizer, other = deepcopy((model, optimizer, decay))
    other.attach(other_optimizer)
    train(other_model, other_optimizer, range(2))
    assert difference(model, mixed()) == 0
    train(model, optimizer, range(2))
    assert difference(model, other_model) == 0


@pytest.mark.parametrize("make", [fz.FrobeniusDecay, fz.NuclearDecay])
def test_a_pickled_decay_is_attached_to_nothing(make: Callable[[nn.Module, float], Any]) -> None:
    model = mixed()
    decay = make(model, STRENGTH).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="not attached"):
        pickle.loads(pickle.dumps(decay)).detach()


def test_a_copied_matcher_is_attached_to_nothing() -> None:
    model = mixed()
    matcher = fz.NormMatcher(model)
    matcher.attach(torch.optim.SGD(model.parameters(), lr=0.1), [matcher.record()])
    with pytest.raises(ValueError, match="not attached"):
        deepcopy(matcher).detach()


@pytest.mark.parametrize(
    "copy", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_model_that_decays_in_its_backward_pass_does_not(copy: Callable[[nn.Module], nn.Module]) -> None:
    model = mixed()
    model.wide.execution = "composed"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fz.FrobeniusDecay(model, STRENGTH, in_backward=True).attach(optimizer)
    copied, plain = copy(model), mixed()
    for twin in (copied, plain):
        loss_of(twin, 0).backward()
    assert torch.allclose(copied.wide.U.grad, plain.wide.U.grad, rtol=1e-10, atol=1e-12)
    assert model.wide.decay_in_backward == STRENGTH


def test_flambe_that_decays_the_products_takes_no_second_decay_of_them() -> None:
    model = mixed()
    optimizer = fz.Flambe(fz.parameter_groups(model, 0.1), model, frobenius_decay={"conv": 0.1})
    with pytest.raises(ValueError, match=r"Flambe decays the same products itself.*twice; use fz\.Lamb, or pass"):
        fz.FrobeniusDecay(model, STRENGTH).attach(optimizer)
    fz.FrobeniusDecay(model, {"linear": STRENGTH}, decoupled=False).attach(
        optimizer
    )  # the others may be decayed by the gradient
    fz.NuclearDecay(model, 0.1).attach(optimizer)


def test_penalties_of_different_kinds_share_an_optimizer() -> None:
    model, reference = twins()
    optimizer, plain = (torch.optim.SGD(twin.parameters(), lr=0.1) for twin in (model, reference))
    fz.FrobeniusDecay(model, STRENGTH).attach(optimizer)
    fz.ProductPenalty(model, lambda W: 0.1 * W.sum()).attach(optimizer)
    train(model, optimizer, range(2))
    linear = fz.ProductPenalty(reference, lambda W: 0.1 * W.sum())
    train(reference, plain, range(2), penalty=lambda: by_weights(reference) + linear.penalty())
    assert difference(model, reference) < 1e-12


@pytest.mark.parametrize("wrong", ["an optimizer", None, torch.optim.lr_scheduler.StepLR])
def test_attaching_to_what_is_no_optimizer_says_so(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"attach takes a torch\.optim\.Optimizer, got (str|NoneType|type)"):
        fz.FrobeniusDecay(mixed(), STRENGTH).attach(wrong)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as accelerate's is: one by type, without hooks of its own."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside
        self.param_groups = inside.param_groups


def test_attaching_to_a_wrapper_says_to_attach_to_what_it_wraps() -> None:
    model = mixed()
    wrapper = Wrapper(torch.optim.SGD(fz.parameter_groups(model, 0.0), lr=0.1))
    matcher = fz.NormMatcher(model)
    for attach in (fz.FrobeniusDecay(model, STRENGTH).attach, lambda optimizer: matcher.attach(optimizer, [])):
        with pytest.raises(ValueError, match="Wrapper only wraps one; attach to that one, before it is wrapped"):
            attach(wrapper)
        attach(wrapper.inside)


def unfreeze_later(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.add_param_group({"params": list(model.wide.factors)})  # with AdamW's own default of 0.01


def raise_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.02


def extend_a_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.param_groups[1]["params"].extend(model.wide.factors)


@pytest.mark.parametrize("change", [unfreeze_later, raise_all, extend_a_group])
@pytest.mark.parametrize("make", DECAYS.values(), ids=DECAYS)
def test_groups_that_come_to_decay_factors_later_are_refused_at_the_next_step(
    change: Callable[[torch.optim.Optimizer, nn.Module], None], make: Callable[[nn.Module], Any]
) -> None:
    model = mixed()
    rest = [p for p in model.parameters() if all(p is not factor for factor in model.wide.factors)]
    others = {"params": list(nn.Linear(2, 2).parameters()), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, others], lr=0.1)
    make(model).attach(optimizer)
    train(model, optimizer, range(1))
    change(optimizer, model)
    before = deepcopy(model)
    with pytest.raises(ValueError, match="they would be decayed twice"):
        train(model, optimizer, range(1, 2))
    assert difference(model, before) == 0


def test_a_schedule_of_the_decay_of_other_parameters_is_none_of_its_business() -> None:
    model = mixed()
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.01), lr=0.1)
    fz.FrobeniusDecay(model, STRENGTH).attach(optimizer)
    for step in range(3):
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        train(model, optimizer, range(step, step + 1))
    assert difference(model, mixed()) > 1e-2


def test_a_decay_made_before_the_parameters_were_replaced_is_told_to_be_made_after() -> None:
    with torch.device("meta"):
        model = nn.Sequential(fz.FactorizedLinear(6, 5, 2))
    decay = fz.FrobeniusDecay(model, STRENGTH)
    model.to_empty(device="cpu")
    with pytest.raises(
        ValueError, match=r"holds none.*the decay after anything that replaces parameters, such as fully_shard and"
    ):
        decay.attach(torch.optim.SGD(model.parameters(), lr=0.1))
