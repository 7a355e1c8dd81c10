"""Layers that are factorized after a decay was made, which would not be decayed."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.decay import guard

LATER = r"^2 was factorized after this decay was made, which does not act on it; make the optimizer and the decay"


def half() -> nn.Sequential:
    """Return a model whose first layer is factorized."""
    torch.manual_seed(0)
    return nn.Sequential(fz.FactorizedLinear(8, 8, 2), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))


def factorize_one_more(model: nn.Sequential) -> None:
    fz.factorize(model, rank=2, include=["2"], min_size=0)
    assert isinstance(model[2], fz.FactorizedLinear)


def set_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


DECAYS: dict[str, Callable[[nn.Module], Any]] = {
    "frobenius": lambda model: fz.FrobeniusDecay(model, 0.1),
    "schedule": lambda model: fz.FrobeniusDecay(model, lambda step: 0.1),
    "by name": lambda model: fz.FrobeniusDecay(model, {"linear": 0.1}),
    "nuclear": lambda model: fz.NuclearDecay(model, 0.1),
}


@pytest.mark.parametrize("make", DECAYS.values(), ids=DECAYS)
def test_a_decay_refuses_to_leave_out_a_layer_that_was_factorized_later(make: Callable[[nn.Module], Any]) -> None:
    model = half()
    decay, by_hand = make(model), make(model)
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.1), lr=0.1)
    decay.attach(optimizer)
    set_gradients(model)
    optimizer.step()
    factorize_one_more(model)
    new = torch.optim.SGD(fz.parameter_groups(model, 0.1), lr=0.1)
    for act in (optimizer.step, optimizer.step, by_hand.apply_, by_hand.penalty, lambda: by_hand.attach(new)):
        with pytest.raises(ValueError, match=LATER):
            act()
    make(model).attach(new)
    set_gradients(model)
    new.step()


def test_flambe_refuses_to_leave_out_a_layer_that_was_factorized_later() -> None:
    model = half()
    optimizer = fz.Flambe(fz.parameter_groups(model, 0.1), model)
    factorize_one_more(model)
    set_gradients(model)
    with pytest.raises(ValueError, match=LATER):
        optimizer.step()


def test_norms_of_a_layer_that_was_factorized_later_are_not_left_out() -> None:
    model = half()
    matcher = fz.NormMatcher(model)
    factorize_one_more(model)
    with pytest.raises(ValueError, match=LATER):
        matcher.record()


def test_a_layer_that_a_decay_would_not_act_on_may_be_factorized_later() -> None:
    model = half()
    decay = fz.FrobeniusDecay(model, {"0": 0.1})
    factorize_one_more(model)
    set_gradients(model)
    decay.apply_()
    assert model[0].U.grad.abs().max() > 0


def test_a_layer_that_is_tied_later_is_decayed_with_the_other() -> None:
    model = half()
    decay = fz.FrobeniusDecay(model, 0.1)
    tied = fz.FactorizedLinear(8, 8, 2)
    tied.weight = model[0].weight
    model.insert(0, tied)
    set_gradients(model)
    decay.apply_()


def test_the_layers_of_a_model_are_searched_only_when_some_layer_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, searched = half(), 0

    def forms(model: nn.Module) -> list[fz.Form]:
        nonlocal searched
        searched += 1
        return fz.forms(model)

    monkeypatch.setattr(guard, "forms", forms)
    decay = fz.FrobeniusDecay(model, 0.1).attach(torch.optim.SGD(fz.parameter_groups(model, 0.1), lr=0.1))
    deepcopy(model)
    for _ in range(3):
        decay.penalty()
    assert searched == 0
    half()  # another model
    for _ in range(3):
        decay.penalty()
    assert searched == 1
