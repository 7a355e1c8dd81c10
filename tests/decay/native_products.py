"""Products for the tests of the CPU kernels, and what their gradients are."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay.build import MAX_RANK, cpu_kernels
from tests.contract import error
from tests.decay.models_for_decay import by_weights

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
# Ranks around the ends of vectors and of what the registers hold; one row; blocks of rows, the last one short.
SHAPES = [(1, 5, 1), (9, 7, 2), (20, 30, 7), (20, 30, 8), (40, 33, 9), (50, 60, 15), (50, 60, 16), (50, 60, 17)]
SHAPES += [(768, 96, 37), (64, 1024, 24), (513, 150, 48), (160, 1535, 49), (300, 300, 65), (1, 7, 1), (3000, 10, 3)]
SHAPES += [(400, 300, 100), (600, 500, MAX_RANK)]

needs_kernels = pytest.mark.skipif(cpu_kernels(torch.float32) is None, reason="needs a C compiler, AVX2 and Linux")


def products(dtype: torch.dtype = torch.float32, shapes: list[tuple[int, int, int]] = SHAPES) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList(fz.FactorizedLinear(n, m, rank, bias=False, dtype=dtype) for m, n, rank in shapes)


def with_gradients(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def exact(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return the Frobenius gradients of all factors in float64, by autograd through the composed weights."""
    twin = deepcopy(model).double()
    gradients = torch.autograd.grad(by_weights(twin, 1.0), list(twin.parameters()))
    return dict(zip(model.parameters(), gradients, strict=True))


def error_of_applying(model: nn.Module) -> float:
    """Return the largest error of one application to the gradients."""
    expected = exact(model)
    before = {parameter: parameter.grad.double().clone() for parameter in with_gradients(model).parameters()}
    fz.FrobeniusDecay(model, 0.3).apply_()
    return max(error(p.grad, before[p] + 0.3 * gradient) for p, gradient in expected.items())
