"""Products whose factors share a kernel's taps: least squares, one factor at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorized.formats import split_kernel
from factorized.formats.calibration import Moment, output_error
from factorized.formats.kernel import KernelShape
from factorized.formats.product import Product
from factorized.formats.split_kernel import refined_factors
from tests.formats.test_calibration import draw

# extents of the weight, groups, whether inputs are along its first dimension
CASES = [
    ((6, 5, 3, 3), 1, False),
    ((6, 5, 3, 3), 1, True),
    ((6, 5, 3, 2), 1, True),
    ((6, 3, 3, 3), 2, False),
    ((6, 3, 2, 3), 2, True),
    ((4, 3, 2, 3, 2), 1, False),
    ((5, 4, 3), 1, True),
]


def problem(extents: tuple[int, ...], groups: int, transposed: bool) -> tuple[Product, Tensor, Moment]:
    """A product, a weight and the moment of correlated inputs."""
    format = Product(KernelShape.of(extents, groups), 3)
    out, inputs, *size = extents
    n = (out // groups if transposed else inputs) * torch.Size(size).numel()
    x = draw(groups, 3 * n, n, seed=1) @ (torch.eye(n, dtype=torch.float64) + 0.3 * draw(n, n, seed=2))
    return format, draw(*extents), Moment(x.mT @ x, transposed)


@pytest.mark.parametrize(("extents", "groups", "transposed"), CASES)
def test_one_factor_is_the_best_for_the_other(
    extents: tuple[int, ...], groups: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    format, W, moment = problem(extents, groups, transposed)
    monkeypatch.setattr(split_kernel, "WORTH_A_SWEEP", 1.0)  # a step of one factor, then both end
    start = format.decompose(W)
    factors = [factor.requires_grad_() for factor in refined_factors(*start, W, moment, format.shape)]
    error = output_error(W - format.compose(factors), [moment], format.shape)
    solved, stepped = torch.autograd.grad(error, factors)[:: -1 if transposed else 1]
    assert solved.norm() < 1e-8 * stepped.norm()
    assert error < output_error(W - format.compose(start), [moment], format.shape)


@pytest.mark.parametrize(("extents", "groups", "transposed"), CASES)
def test_a_step_of_the_other_factor_ends_where_the_error_along_it_is_least(
    extents: tuple[int, ...], groups: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    format, W, moment = problem(extents, groups, transposed)
    monkeypatch.setattr(split_kernel, "SWEEPS", 1)
    start, place = format.decompose(W), 0 if transposed else 1
    factors = [factor.requires_grad_() for factor in refined_factors(*start, W, moment, format.shape)]
    error = output_error(W - format.compose(factors), [moment], format.shape)
    gradient, step = torch.autograd.grad(error, factors[place])[0], factors[place] - start[place]
    products = (gradient * step).detach().reshape(groups, -1).sum(1)
    assert (products.abs() < 1e-8 * gradient.norm() * step.norm()).all()


@pytest.mark.parametrize(("extents", "groups", "transposed"), CASES)
def test_many_sweeps_end_where_the_error_is_stationary(
    extents: tuple[int, ...], groups: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    format, W, moment = problem(extents, groups, transposed)
    gradients = []
    for sweeps in (1, 1000):
        monkeypatch.setattr(split_kernel, "SWEEPS", sweeps)
        monkeypatch.setattr(split_kernel, "WORTH_A_SWEEP", -1.0)  # go on
        factors = [one.requires_grad_() for one in refined_factors(*format.decompose(W), W, moment, format.shape)]
        error = output_error(W - format.compose(factors), [moment], format.shape)
        gradients.append(torch.cat([one.flatten() for one in torch.autograd.grad(error, factors)]).norm())
    assert gradients[1] < 1e-4 * gradients[0]


@pytest.mark.parametrize("rank", [2, 4])
def test_a_weight_of_low_rank_is_found_from_another_start(rank: int) -> None:
    format, _, moment = problem((6, 5, 3, 3), 1, False)
    W = format.compose([draw(18, 3, seed=4) * torch.tensor([1, 1, 0]), draw(15, 3, seed=5)])  # of rank 2
    wider = Product(format.shape, rank)
    factors = refined_factors(draw(18, rank, seed=6), draw(15, rank, seed=7), W, moment, format.shape)
    error = output_error(W - wider.compose(factors), [moment], format.shape)
    assert error < 1e-2 * output_error(W, [moment], format.shape)
    assert all(factor.isfinite().all() for factor in factors)


def test_columns_that_hold_nothing_do_not_keep_others_from_being_refined() -> None:
    format, W, moment = problem((6, 5, 3, 3), 1, False)
    start = [factor * torch.tensor([1, 1, 0]) for factor in format.decompose(W)]
    before, after = (
        output_error(W - format.compose(factors), [moment], format.shape)
        for factors in (start, refined_factors(*start, W, moment, format.shape))
    )
    assert after < 0.95 * before


def test_a_group_of_zeros_does_not_keep_others_from_being_refined() -> None:
    format, W, moment = problem((6, 3, 3, 3), 2, False)
    W[:3] = 0
    found = format.calibrate(W, [moment])
    other = Product(KernelShape.of((3, 3, 3, 3)), 3).calibrate(W[3:], [Moment(moment.sums[1:])])
    weight = format.compose(found)
    assert not weight[:3].any()
    torch.testing.assert_close(weight[3:], Product(KernelShape.of((3, 3, 3, 3)), 3).compose(other))


def test_zeros_and_what_is_no_moment_change_nothing() -> None:
    format, W, moment = problem((6, 5, 3, 3), 1, False)
    start = (torch.zeros(18, 3, dtype=torch.float64), torch.zeros(15, 3, dtype=torch.float64))
    assert all(not factor.any() for factor in refined_factors(*start, W, moment, format.shape))
    factors = format.decompose(W)
    found = refined_factors(*factors, W, Moment(-moment.sums), format.shape)
    assert all(torch.equal(a, b) for a, b in zip(found, factors, strict=True))


@pytest.mark.parametrize(("extents", "groups", "transposed"), CASES)
def test_a_weight_that_the_factors_can_hold_is_kept_where_no_input_shows_it(
    extents: tuple[int, ...], groups: int, transposed: bool
) -> None:
    format, W, moment = problem(extents, groups, transposed)
    W = format.compose(format.decompose(W))
    shown = torch.arange(moment.sums.shape[-1]) % 2
    seen = Moment(moment.sums * shown * shown[:, None], transposed)
    torch.testing.assert_close(format.compose(format.calibrate(W, [seen])), W, rtol=1e-9, atol=1e-9)
