from __future__ import annotations

import pytest
import torch

from factorized.maths.light_expansion import expand_for_training
from factorized.maths.tensor_format import TensorFormat
from factorized.maths.tensor_train import TrainFormat
from factorized.maths.tucker import TuckerFormat


@pytest.mark.parametrize(
    ("tensor", "keeps_little"),
    [
        (TuckerFormat((5, 4, 3), (4, 4, 3)), False),
        (TuckerFormat((20, 4, 3), (11, 4, 3)), False),  # more rows than slices
        (TuckerFormat((1, 4, 3), (1, 3, 3)), False),
        (TuckerFormat((6, 5, 3, 2), (6, 5), kept=2), False),
        (TuckerFormat((5, 4, 3), (4, 4, 3), core="train"), False),
        (TuckerFormat((9, 8, 7), (2, 2, 2)), True),
        (TrainFormat((5, 4, 3), (2, 2)), True),
    ],
    ids=str,
)
def test_gradients_are_those_of_autograd_through_the_plain_expansion(tensor: TensorFormat, keeps_little: bool) -> None:
    torch.manual_seed(0)
    assert tensor.keeps_little == keeps_little
    cores = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in tensor.core_shapes]
    at = torch.randn(tensor.dims, dtype=torch.float64)
    plain, light = tensor.expand(cores), expand_for_training(tensor, cores)
    assert torch.equal(plain, light)
    expected = torch.autograd.grad(plain, cores, at)
    for gradient, wanted in zip(torch.autograd.grad(light, cores, at), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
