"""Spectra, nuclear gradients and truncation of products, from their factors alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorized.formats.frobenius import compose
from factorized.formats.svd import factor_spectrum, nuclear_gradients, truncated_factors
from factorized.testing import error


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_singular_values_and_nuclear_gradients_come_from_the_factors_alone(depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    U, V = (torch.randn(2, long, 4, generator=generator, dtype=torch.float64, requires_grad=True) for long in (9, 7))
    inner = [torch.randn(2, 4, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(depth)]
    product = compose(U, V, inner)
    values = torch.linalg.svdvals(product)[..., :4]
    torch.testing.assert_close(factor_spectrum(U, V, inner), values, rtol=1e-10, atol=1e-12)
    expected = torch.autograd.grad(torch.linalg.matrix_norm(product, "nuc").sum(), [U, V, *inner])
    dU, dV, d_inner = nuclear_gradients(U.detach(), V.detach(), [M.detach() for M in inner])
    for got, wanted in zip([dU, dV, *d_inner], expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


def test_nuclear_gradients_leave_out_directions_that_the_product_does_not_have() -> None:
    U, V = gaussian(9, 4, seed=1), gaussian(7, 4, seed=2)
    U[:, 2:] = 0  # the product has rank 2
    A, _, Bh = torch.linalg.svd(U @ V.mT)
    direction = A[:, :2] @ Bh[:2]
    dU, dV, _ = nuclear_gradients(U, V)
    torch.testing.assert_close(dU, direction @ V, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(dV, direction.mT @ U, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("m", "n", "k"), [(12, 9, 4), (9, 12, 4), (3, 12, 5), (12, 3, 5), (1, 1, 3)])
def test_factors_truncated_at_their_own_rank_keep_the_product_and_share_its_spectrum_evenly(
    m: int, n: int, k: int
) -> None:
    U, V = gaussian(2, m, k), gaussian(2, n, k, seed=1)
    left, right = truncated_factors(U, V, k)
    assert (left.shape, right.shape) == (U.shape, V.shape)
    assert error(left @ right.mT, U @ V.mT) < 1e-12
    rank = min(m, n, k)
    values = torch.linalg.svdvals(U @ V.mT)[:, :rank]
    for factor in (left, right):
        torch.testing.assert_close(factor[..., :rank].square().sum(-2), values)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_truncated_factors_lose_exactly_the_tail_of_the_singular_values(rank: int) -> None:
    U, V = gaussian(3, 12, 4), gaussian(3, 9, 4, seed=1)
    left, right = truncated_factors(U, V, rank)
    tail = torch.linalg.svdvals(U @ V.mT)[:, rank:].square().sum()
    assert abs((left @ right.mT - U @ V.mT).square().sum() - tail) < 1e-10


def test_truncating_factors_forms_nothing_as_large_as_the_product() -> None:
    m = 2**17  # the product would be 2^34 entries
    left, right = truncated_factors(torch.ones(m, 2), torch.eye(m, 2), 1)
    assert (left.shape, right.shape) == ((m, 1), (m, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_factors_of_half_types_are_truncated_in_float32_and_come_back(dtype: torch.dtype) -> None:
    U, V = gaussian(8, 3, dtype=dtype), gaussian(7, 3, seed=1, dtype=dtype)
    left, right = truncated_factors(U, V, 3)
    assert left.dtype == right.dtype == dtype
    assert error(left.double() @ right.double().mT, U.double() @ V.double().mT) < 0.03
