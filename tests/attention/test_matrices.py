from __future__ import annotations

import pytest
import torch

from factorized.attention.matrices import folded_values, rebalance, stacked_by_group, unstacked, with_bias_row
from factorized.testing import error


def thin(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("m", "n", "k"), [(12, 9, 4), (9, 12, 4), (3, 12, 5), (12, 3, 5), (1, 1, 3)])
def test_rebalancing_keeps_the_product_and_shares_its_spectrum_evenly(m: int, n: int, k: int) -> None:
    U, V = thin(2, m, k), thin(2, n, k)
    left, right = rebalance(U, V, k)
    assert (left.shape, right.shape) == (U.shape, V.shape)
    assert error(left @ right.mT, U @ V.mT) < 1e-12
    rank = min(m, n, k)
    values = torch.linalg.svdvals(U @ V.mT)[:, :rank]
    for factor in (left, right):
        torch.testing.assert_close(factor[..., :rank].square().sum(-2), values)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_truncation_loses_exactly_the_tail_of_the_singular_values(rank: int) -> None:
    U, V = thin(3, 12, 4), thin(3, 9, 4)
    left, right = rebalance(U, V, rank)
    tail = torch.linalg.svdvals(U @ V.mT)[:, rank:].square().sum()
    assert abs((left @ right.mT - U @ V.mT).square().sum() - tail) < 1e-10


def test_nothing_as_large_as_the_product_is_made() -> None:
    m = 2**17  # the product would be 2^34 entries
    left, right = rebalance(torch.ones(m, 2), torch.eye(m, 2), 1)
    assert (left.shape, right.shape) == ((m, 1), (m, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_types_are_computed_in_float32_and_come_back(dtype: torch.dtype) -> None:
    U, V = thin(8, 3).to(dtype), thin(7, 3).to(dtype)
    left, right = rebalance(U, V, 3)
    assert left.dtype == right.dtype == dtype
    assert error(left.double() @ right.double().mT, U.double() @ V.double().mT) < 0.03


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
