"""Sums of Kronecker products: the second format that took one file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.formats.kernel import KernelShape
from factorized.formats.kronecker import Kronecker, KroneckerFormat

SHAPES = [(12, 8), (8, 6, 3), (8, 12, 3, 3)]


def random_weight(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_is_the_sum_of_the_products_that_torch_computes(shape: tuple[int, ...]) -> None:
    format = Kronecker().at_rank(KernelShape.of(shape), 2)
    A, B = format.decompose(random_weight(shape))
    kernels = B.reshape(2, *format.inner)
    expected = sum(torch.kron(a.reshape(*a.shape, *[1] * (len(shape) - 2)), b) for a, b in zip(A, kernels, strict=True))
    torch.testing.assert_close(format.compose((A, B)), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_of_two_products_is_found_again_and_full_rank_holds_any_weight(shape: tuple[int, ...]) -> None:
    two = Kronecker().at_rank(KernelShape.of(shape), 2)
    weight = two.compose([random_weight((*extents,)) for extents in two.cores.values()])
    torch.testing.assert_close(two.compose(two.decompose(weight)), weight)
    full = Kronecker().at_scale(KernelShape.of(shape), 1.0)
    weight = random_weight(shape)
    torch.testing.assert_close(full.compose(full.decompose(weight)), weight)


def test_the_approximation_is_the_best_by_the_singular_values_of_the_rearranged_weight() -> None:
    format = KroneckerFormat(KernelShape.of((12, 8)), (3, 2), 2)
    weight = random_weight((12, 8))
    rearranged = weight.reshape(3, 4, 2, 4).transpose(1, 2).reshape(6, 16)
    lost = torch.linalg.svdvals(rearranged)[2:].square().sum()
    error = (format.compose(format.decompose(weight)) - weight).square().sum()
    torch.testing.assert_close(error, lost)


def test_a_model_of_convolutions_can_be_moved_to_channels_last() -> None:
    model = fz.factorize(nn.Sequential(nn.Conv2d(8, 12, 3)), Kronecker(), rank=2, keep_first_and_last=False)
    x = torch.randn(2, 8, 5, 5)
    before = model(x)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(x), before)


def test_a_budget_is_met_and_the_plan_survives_json() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plan = fz.plan(model, Kronecker(), ratio=0.3, keep_first_and_last=False)
    assert 0.28 < plan.ratio <= 0.3
    assert fz.Plan.from_dict(plan.to_dict()) == plan
    assert plan.entries[1].params_after == plan.entries[1].rank * (8 * 8 + 8 * 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kronecker().at_rank(KernelShape.of((12, 8)), 7), r"rank must be in 1..6"),
        (lambda: Kronecker(8), "outer must be a tuple of two whole numbers of at least 1, got 8"),
        (lambda: Kronecker((8, 0)), r"outer must be a tuple of two whole numbers of at least 1, got \(8, 0\)"),
        (lambda: Kronecker((5, 2)).at_rank(KernelShape.of((12, 8)), 1), "outer must divide"),
        (lambda: KroneckerFormat(KernelShape.of((12, 8)), (3, 2), 0), "rank must be a whole number of at least 1"),
    ],
)
def test_a_wrong_argument_says_what_is_allowed(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
