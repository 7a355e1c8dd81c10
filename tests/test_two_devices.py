"""A model whose layers lie on two devices, as large ones are spread by hand or by accelerate."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import factorized as fz
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda


def pair() -> tuple[nn.Module, nn.Module]:
    """Return a model on two devices, and its copy on the CPU."""
    torch.manual_seed(0)
    model = nn.ModuleList(fz.FactorizedLinear(24, 20, rank, bias=False) for rank in (3, 3, 5, 5))
    spread = deepcopy(model)
    spread[1::2].cuda()
    for parameter in (*model.parameters(), *spread.parameters()):
        parameter.grad = torch.ones_like(parameter)
    return spread, model


def check_equal(spread: nn.Module, model: nn.Module) -> None:
    for actual, expected in zip(spread.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: fz.FrobeniusDecay(model, 0.3), id="number"),
        pytest.param(lambda model: fz.FrobeniusDecay(model, torch.tensor(0.3)), id="tensor"),
        pytest.param(lambda model: fz.FrobeniusDecay(model, torch.tensor(0.3, device="cuda")), id="tensor-on-gpu"),
        pytest.param(lambda model: fz.NuclearDecay(model, 0.3), id="nuclear"),
        pytest.param(lambda model: fz.ProductPenalty(model, lambda W: W.abs().sum()), id="any"),
    ],
)
def test_a_penalty_and_what_it_adds_are_those_on_one_device(make: Callable[[nn.Module], fz.FrobeniusDecay]) -> None:
    spread, model = pair()
    penalties = []
    for each in (spread, model):
        decay = make(each)
        decay.apply_()
        penalties.append(decay.penalty().item())
    assert penalties[0] == pytest.approx(penalties[1], rel=1e-5)
    for actual, expected in zip(spread.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: sgd(model, decoupled=False), id="sgd"),
        pytest.param(lambda model: sgd(model, decoupled=True), id="sgd-decoupled"),
        pytest.param(lambda model: fz.Lamb(model.parameters(), lr=0.1, max_grad_norm=1.0), id="lamb"),
        pytest.param(lambda model: fz.Flambe(model.parameters(), model, lr=0.1, frobenius_decay=0.1), id="flambe"),
    ],
)
def test_a_step_is_that_on_one_device(make: Callable[[nn.Module], Optimizer]) -> None:
    spread, model = pair()
    for each in (spread, model):
        make(each).step()
    check_equal(spread, model)


def sgd(model: nn.Module, decoupled: bool) -> Optimizer:
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.1), lr=0.1)
    fz.FrobeniusDecay(model, 0.3, decoupled=decoupled).attach(optimizer)
    return optimizer


def test_norms_are_recorded_and_matched() -> None:
    spread, model = pair()
    recorded = fz.NormMatcher(model).record()
    matcher = fz.NormMatcher(spread)
    assert matcher.record() == pytest.approx(recorded, rel=1e-5)
    with torch.no_grad():
        for parameter in spread.parameters():
            parameter.mul_(1.7)
    matcher.match(recorded)
    assert matcher.record() == pytest.approx(recorded, rel=1e-5)


def test_it_is_diagnosed() -> None:
    spread, model = pair()
    actual, expected = (fz.diagnose(each, lr=0.1) for each in (spread, model))
    assert [row.frobenius for row in actual] == pytest.approx([row.frobenius for row in expected], rel=1e-5)
