from __future__ import annotations

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.optim.norms import norms
from tests.optim.lamb_reference import Settings, lamb


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_tensors_are_measured_in_single_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(90, 70).to(dtype), torch.full((300, 300), 300.0).to(dtype)]  # the second: 90,000
    found = norms(weights, weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.stack([w.double().norm() for w in weights]), rtol=1e-4, atol=0)


def test_tensors_beside_a_double_are_measured_in_double() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(50, 3), torch.randn(4, dtype=torch.float64), torch.zeros(0, 3)]
    expected = torch.stack([weight.double().norm() for weight in weights])
    torch.testing.assert_close(norms(weights, weights), expected, rtol=1e-14, atol=0)


def test_half_gradients_whose_norm_is_beyond_their_type_are_no_reason_to_stop() -> None:
    weight = nn.Parameter(torch.ones(300, 300, dtype=torch.float16))
    weight.grad = torch.full_like(weight, 300.0)
    fz.Lamb([weight], lr=0.1, weight_decay=0.0).step()
    assert weight.isfinite().all()
    assert (weight.detach() - 0.9).abs().max() < 1e-3  # ‖w‖/‖u‖ is 1


def test_one_step_of_half_weights_is_that_of_doubles_rounded_once() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(64, 48).bfloat16(), torch.randn(64, 48).bfloat16()
    weight = nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    fz.Lamb([weight], lr=0.5, max_grad_norm=None, weight_decay=0.1).step()
    settings = Settings(lr=0.5, weight_decay=0.1, max_grad_norm=None)
    (expected,) = lamb([start.double()], [[gradient.double()]], settings)
    assert ((weight.detach().double() - expected).norm() / expected.norm()).item() < 4e-3
