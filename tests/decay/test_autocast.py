"""Steps and penalties inside autocast, which rounds the products of a model but not those of its decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from tests.decay.models_for_decay import STRENGTH, Mixed, difference, loss_of, shaken

AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


def single() -> nn.Module:
    torch.manual_seed(0)
    return shaken(Mixed(), torch.float32)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(fz.parameter_groups(model, 0.0), lr=0.1)


def attached(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def prepare(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        make(model).attach(optimizer)
        return optimizer

    return prepare


PENALTIES: dict[str, Callable[[nn.Module], Any]] = {
    "frobenius": lambda model: fz.FrobeniusDecay(model, STRENGTH),
    "product": lambda model: fz.ProductPenalty(model, lambda W: (W @ W.mT).square().sum()),
    "nuclear": lambda model: fz.NuclearDecay(model, STRENGTH),
}
PREPARED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **{name: attached(make) for name, make in PENALTIES.items()},
    "decoupled": attached(lambda model: fz.FrobeniusDecay(model, STRENGTH, decoupled=True)),
    "flambe": lambda model: fz.Flambe(fz.parameter_groups(model, 0.0), model, lr=0.1, frobenius_decay=STRENGTH),
}


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED)
def test_a_step_inside_autocast_is_that_outside(prepare: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    inside, outside = single(), single()
    for model, enabled in ((inside, True), (outside, False)):
        optimizer = prepare(model)
        loss_of(model, 0).backward()
        with torch.autocast(**AUTOCAST, enabled=enabled):
            optimizer.step()
    assert difference(inside, outside) == 0
    assert difference(inside, single()) > 1e-2


@pytest.mark.parametrize("make", PENALTIES.values(), ids=PENALTIES)
def test_a_penalty_in_a_loss_inside_autocast_keeps_its_digits_and_those_of_its_gradient(
    make: Callable[[nn.Module], Any],
) -> None:
    results = []
    for enabled in (True, False):
        model = single()
        with torch.autocast(**AUTOCAST, enabled=enabled):
            penalty = make(model).penalty()
        penalty.backward()
        results.append([penalty, *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_decay_compiles_whole_inside_autocast() -> None:
    torch.manual_seed(0)
    model = shaken(nn.ModuleList(fz.FactorizedLinear(12, 14, 3, bias=False) for _ in range(2)), torch.float32)
    decay = fz.FrobeniusDecay(model, STRENGTH)
    compiled = torch.compile(decay.apply_, fullgraph=True, backend="aot_eager")
    added = []
    for act in (decay.apply_, compiled):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with torch.autocast(**AUTOCAST):
            act()
        added.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*added, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
