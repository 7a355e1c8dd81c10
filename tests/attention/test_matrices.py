from __future__ import annotations

import torch

from factorized.attention.matrices import folded_values, stacked_by_group, unstacked, with_bias_row
from factorized.testing import error


def thin(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_matrix_above_its_bias_multiplies_an_input_with_a_one() -> None:
    W, bias, x = thin(2, 5, 3), thin(2, 3), thin(5)
    assert error(torch.cat([x, x.new_ones(1)]) @ with_bias_row(W, bias), x @ W + bias) < 1e-12
    assert error(torch.cat([x, x.new_ones(1)]) @ with_bias_row(W, None), x @ W) < 1e-12


def test_folded_values_are_what_constant_values_add_to_the_output() -> None:
    output, bias = thin(4, 5, 3), thin(2, 3)
    expected = sum(output[head] @ bias[head // 2] for head in range(4))
    assert error(folded_values(output, bias), expected) < 1e-12


def test_stacking_by_group_is_undone() -> None:
    factor = thin(6, 5, 2)
    stack = stacked_by_group(factor, 3)
    assert stack.shape == (2, 15, 2)
    assert error(stack[1, 5:10], factor[4]) == 0
    assert error(unstacked(stack, 3), factor) == 0
