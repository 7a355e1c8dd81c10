"""How LAMB updates many tensors: in few passes over memory, whatever their layout, type and state."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import factorized as fz
from benchmarks.optimizers import passes
from tests.optim.lamb_reference import Settings, draws, lamb, run


def built() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(fz.FactorizedLinear(300, 200, 16), nn.Linear(200, 100))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def flambe(model: nn.Module) -> torch.optim.Optimizer:
    return fz.Flambe(model.parameters(), model, frobenius_decay=0.1, max_grad_norm=None)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda model: torch.optim.AdamW(model.parameters(), fused=True), 7, id="fused-adamw"),
        pytest.param(lambda model: fz.Lamb(model.parameters(), max_grad_norm=None), 15, id="lamb"),
        pytest.param(lambda model: fz.Lamb(model.parameters(), max_grad_norm=1e9), 15, id="lamb-that-need-not-clip"),
        pytest.param(lambda model: fz.Lamb(model.parameters(), max_grad_norm=1e-3), 17, id="lamb-that-clips"),
    ],
)
def test_an_update_passes_over_memory_few_times(
    make: Callable[[nn.Module], torch.optim.Optimizer], expected: int
) -> None:
    model = built()
    update = make(model).step
    update()  # makes the state
    assert round(passes(update, list(model.parameters())), 1) == expected


def test_decay_of_products_takes_three_more_passes_over_the_factors() -> None:
    model = fz.FactorizedLinear(3000, 2000, 4, bias=False)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    update = flambe(model).step
    update()
    # Zeros are written in place of λw (-1); then Gram matrices read the factors (1), and products are added (3).
    assert round(passes(update, list(model.parameters())), 1) == 18


def test_small_tensors_of_one_shape_that_go_together_take_their_own_steps() -> None:
    shapes = ((7,), (3, 2), (7,), (200, 100), (), (3, 2), (7,), (200, 100), ())
    start, *gradients = draws(shapes, 4)
    settings = Settings(lr=0.1, weight_decay=0.1)
    weights = [nn.Parameter(weight.clone()) for weight in start]
    run(fz.Lamb(weights, lr=0.1, weight_decay=0.1, max_grad_norm=None), weights, gradients)
    for weight, expected in zip(weights, lamb(start, gradients, settings), strict=True):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_gradients_and_moments_of_another_layout_train_the_same() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 3, 5, 2), [torch.randn(4, 3, 5, 2) for _ in range(6)]
    settings = Settings(lr=0.1, weight_decay=0.1)
    (expected,) = lamb([start.double()], [[gradient.double()] for gradient in gradients], settings)
    weight = nn.Parameter(start.clone())
    optimizer = fz.Lamb([weight], lr=0.1, weight_decay=0.1, max_grad_norm=None)
    run(optimizer, [weight], [[gradient] for gradient in gradients[:2]])
    with torch.no_grad():
        weight.data = weight.to(memory_format=torch.channels_last)  # the moments stay as they are
    run(optimizer, [weight], [[gradient] for gradient in gradients[2:4]])
    run(optimizer, [weight], [[gradient.mT.contiguous().mT] for gradient in gradients[4:]])
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_is_a_view_with_gaps_trains_like_any_other() -> None:
    torch.manual_seed(0)
    whole, gradient = torch.randn(6, 8), torch.randn(6, 4)
    weight, plain = nn.Parameter(whole[:, ::2]), nn.Parameter(whole[:, ::2].clone())
    for each in (weight, plain):
        each.grad = gradient.clone()
        fz.Lamb([each], lr=0.1).step()
    assert not weight.is_contiguous()
    torch.testing.assert_close(weight, plain, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_step_is_an_eager_one() -> None:
    model = built()
    other = copy.deepcopy(model)
    for each, mine in zip(other.parameters(), model.parameters(), strict=True):
        each.grad = mine.grad
    eager, compiled = flambe(model).step, torch.compile(flambe(other).step, backend="aot_eager")
    for _ in range(3):
        eager()
        compiled()
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-8)
