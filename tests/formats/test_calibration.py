"""Approximations that keep outputs: the closed form, its regularization, and alternating least squares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from factorized.formats import calibration
from factorized.formats.calibration import (
    Moment,
    added,
    by_output,
    calibrated_factors,
    corrected,
    output_error,
    output_spectrum,
    refined,
    regularized,
)
from factorized.formats.format import Format
from factorized.formats.kernel import KernelShape
from factorized.formats.kronecker import Kronecker
from factorized.formats.monarch import Monarch
from factorized.formats.product import LowRank, Product
from factorized.formats.residual import Residual
from factorized.formats.scheme import Scheme
from factorized.formats.tensor_train import TensorTrain
from factorized.formats.tucker import Tucker


def draw(*extents: int, seed: int = 0) -> Tensor:
    return torch.randn(*extents, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment_of(n: int, groups: int = 1, transposed: bool = False, samples: int = 0) -> Moment:
    """A moment whose eigenvalues fall by six orders of magnitude, of rank ``samples`` if that is given."""
    x = draw(groups, samples or 2 * n, n, seed=1) * torch.logspace(0, -3, n, dtype=torch.float64)
    x = x @ torch.linalg.qr(draw(groups, n, n, seed=2)).Q
    return Moment(x.mT @ x, transposed)


def optimum(W: Tensor, C: Tensor, rank: int) -> Tensor:
    """The smallest error by Eckart-Young: the tail of the singular values of ``W C^½``."""
    values, Q = torch.linalg.eigh(C)
    root = Q * values.clamp(min=0).sqrt().unsqueeze(-2)
    return torch.linalg.svdvals(W @ root)[..., rank:].square().sum()


@pytest.mark.parametrize("extents", [(12, 30), (30, 12), (20, 20)])
@pytest.mark.parametrize("rank", [1, 4, 11])
def test_the_closed_form_reaches_the_optimum(extents: tuple[int, int], rank: int) -> None:
    W, C = draw(1, *extents), moment_of(extents[1]).sums
    U, V = calibrated_factors(W, C, rank)
    D = W - U @ V.mT
    torch.testing.assert_close((D @ C * D).sum(), optimum(W, C, rank), rtol=1e-8, atol=0)
    torch.testing.assert_close(U.mT @ U, V.mT @ V)  # balanced, like spectral factors


@pytest.mark.parametrize("extents", [(12, 30), (30, 12)])
def test_the_eigendecomposition_is_of_the_shorter_side(
    extents: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides: list[int] = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: sides.append(A.shape[-1]) or eigh(A))
    calibrated_factors(draw(1, *extents), moment_of(extents[1]).sums, 4)
    assert sides[0] == max(sides) == 12


def test_a_moment_that_is_the_identity_gives_the_truncated_svd() -> None:
    W = draw(2, 9, 14)
    U, V = calibrated_factors(W, torch.eye(14, dtype=torch.float64).expand(2, 14, 14), 3)
    A, S, B = torch.linalg.svd(W, full_matrices=False)
    torch.testing.assert_close(U @ V.mT, A[..., :3] * S[..., None, :3] @ B[..., :3, :])


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 3])
def test_products_of_any_depth_and_groups_reach_the_optimum(depth: int, groups: int) -> None:
    format = Product(KernelShape.of((groups * 8, 10), groups), 3, depth)
    W, moment = draw(groups * 8, 10), moment_of(10, groups)
    cores = format.calibrate(W, [moment])
    assert [tuple(core.shape) for core in cores] == list(format.cores.values())
    error = output_error(W - format.compose(cores), [moment], format.shape)
    torch.testing.assert_close(error, optimum(W.view(groups, 8, 10), moment.sums, 3), rtol=1e-4, atol=0)


def test_kernels_split_over_both_factors_get_balanced_ones() -> None:
    format, W = Product(KernelShape.of((8, 6, 3, 3)), 5), draw(8, 6, 3, 3)
    U, V = format.calibrate(W, [moment_of(54)])
    torch.testing.assert_close(U.mT @ U, V.mT @ V)


@pytest.mark.parametrize("depth", [0, 1])
def test_before_any_sweep_it_is_as_good_as_the_decomposition(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    format, W = Product(KernelShape.of((4, 2, 3, 3)), 1, depth), draw(4, 2, 3, 3, seed=132)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(132))
    x = draw(1, 3, 18, seed=1132) * torch.logspace(0, -3, 18, dtype=torch.float64)[order]
    moment = Moment(x.mT @ x)
    monkeypatch.setattr("factorized.formats.split_kernel.SWEEPS", 0)  # which would lower the error of any start
    found, plain = (format.compose(cores) for cores in (format.calibrate(W, [moment]), format.decompose(W)))
    errors = [output_error(W - weight, [moment], format.shape) for weight in (found, plain)]
    assert errors[0] <= 1.001 * errors[1]


def test_a_table_of_rows_reaches_the_optimum_for_counts_and_for_a_transposed_weight() -> None:
    format, W = Product(KernelShape.of((40, 6)), 2), draw(40, 6)
    counts = torch.arange(40, dtype=torch.float64).unsqueeze(0)
    for moment, C in (
        (Moment(counts, True), torch.diag(counts[0])),
        (full := moment_of(40, transposed=True), full.sums),
    ):
        error = output_error(W - format.compose(format.calibrate(W, [moment])), [moment], format.shape)
        torch.testing.assert_close(error, optimum(W.mT, C.view(1, 40, 40), 2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("samples", [1, 3, 7])
def test_directions_without_inputs_are_kept_by_the_size_of_their_weights(samples: int) -> None:
    W, moment = draw(12, 20), moment_of(20, samples=samples)
    format = Product(KernelShape.of((12, 20)), 7)
    kept = format.compose(format.calibrate(W, [moment]))
    scale = output_error(W, [moment], format.shape)
    assert output_error(W - kept, [moment], format.shape) <= 1e-7 * scale  # every sample is reproduced
    # and what is left of the rank approximates the rest of W as well as it can beside the outputs
    outputs = torch.linalg.qr(W @ torch.linalg.eigh(moment.sums[0]).eigenvectors[:, -samples:]).Q
    rest = W - outputs @ (outputs.mT @ W)
    best = torch.linalg.svdvals(rest)[7 - samples :].square().sum()
    torch.testing.assert_close((W - kept).square().sum(), best, rtol=1e-3, atol=0)


def test_inputs_of_very_different_sizes_that_the_weights_make_up_for_reach_the_optimum() -> None:
    sizes = torch.logspace(-6, 6, 20, dtype=torch.float64)
    W, alike = draw(12, 20), moment_of(20)
    apart = Moment(alike.sums * sizes * sizes.unsqueeze(-1))
    format = Product(KernelShape.of((12, 20)), 4)
    error = output_error(W / sizes - format.compose(format.calibrate(W / sizes, [apart])), [apart], format.shape)
    torch.testing.assert_close(error, optimum(W, alike.sums, 4), rtol=1e-4, atol=0)
    spectra = [output_spectrum(*one, format.shape) for one in ((W / sizes, [apart]), (W, [alike]))]
    torch.testing.assert_close(*spectra, rtol=1e-4, atol=0)


def test_inputs_that_are_all_zero_give_spectral_factors() -> None:
    W, format = draw(12, 20), Product(KernelShape.of((12, 20)), 4)
    cores = format.calibrate(W, [Moment(torch.zeros(1, 20, 20, dtype=torch.float64))])
    torch.testing.assert_close(format.compose(cores), format.compose(format.decompose(W)))
    nothing = Moment(torch.zeros(1, 5, dtype=torch.float64), transposed=True)
    assert regularized(nothing, draw(5, 3), KernelShape.of((5, 3))).sums.eq(1).all()


def test_a_weight_of_zeros_gives_finite_factors_that_can_learn() -> None:
    format = Product(KernelShape.of((6, 8)), 2)
    U, V = format.calibrate(torch.zeros(6, 8), [moment_of(8)])
    assert not U.any()
    assert V.isfinite().all()
    assert V.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_factors_have_the_type_of_the_weight_and_only_its_rounding(dtype: torch.dtype) -> None:
    W, moment = draw(12, 20).to(dtype), moment_of(20)
    format = Product(KernelShape.of((12, 20)), 5)
    cores = format.calibrate(W, [moment])
    assert {core.dtype for core in cores} == {dtype}
    exact = format.compose(format.calibrate(W.double(), [moment]))
    scale = torch.finfo(dtype).eps * exact.norm()
    assert (format.compose([core.double() for core in cores]) - exact).norm() < scale


FORMATS: list[tuple[Scheme, float]] = [
    (LowRank(), 0.2),
    (LowRank("channel"), 0.3),
    (Monarch(), 0.3),
    (Kronecker(), 0.3),
    (TensorTrain(), 0.4),
    (Tucker(), 0.4),
    (Tucker(separable=True), 0.3),
]
SHAPES: list[tuple[tuple[int, ...], int, bool]] = [
    ((16, 12), 1, False),
    ((16, 12), 1, True),
    ((16, 12, 3), 1, False),
    ((16, 12, 3, 3), 1, False),
    ((16, 12, 3, 3), 1, True),
    ((16, 6, 3, 3), 2, False),
    ((16, 6, 3, 3), 2, True),
    ((8, 4, 2, 3, 3), 1, False),
]


def formats() -> list[Any]:
    made = []
    for scheme, scale in FORMATS:
        for extents, groups, transposed in SHAPES:
            try:
                format = scheme.at_scale(scheme.kernel(extents, groups), scale)
            except ValueError:
                continue  # the scheme has no format for this shape
            made.append(pytest.param(format, transposed, id=f"{scheme}-{extents}-{groups}-{transposed}"))
    return made


@pytest.mark.parametrize(("format", "transposed"), formats())
def test_every_format_has_a_smaller_output_error_than_its_decomposition(format: Format, transposed: bool) -> None:
    shape = format.shape
    out, inputs, *size = shape.weight_shape
    n = (out // shape.groups if transposed else inputs) * torch.Size(size).numel()
    W, moment = draw(*shape.weight_shape), moment_of(n, shape.groups, transposed)
    spectral, ours = (
        output_error(W - format.compose(cores), [moment], shape)
        for cores in (format.decompose(W), format.calibrate(W, [moment]))
    )
    assert ours < 0.95 * spectral


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize(
    "scheme", [Monarch(), Kronecker(), TensorTrain(order=3), Tucker(), Tucker(core="train")], ids=str
)
def test_rows_that_no_input_looks_up_keep_their_size_in_every_format(scheme: Scheme, rows: int) -> None:
    format = scheme.at_scale(scheme.kernel((9, 6)), 0.6)
    moment = Moment(torch.tensor([[6.0] * rows + [0.0] * (9 - rows)], dtype=torch.float64), True)
    for seed in range(5):
        W = draw(9, 6, seed=seed)
        kept = [format.compose(cores) for cores in (format.decompose(W), format.calibrate(W, [moment]))]
        spectral, ours = (output_error(W - weight, [moment], format.shape) for weight in kept)
        assert ours <= (1 + 1e-6) * spectral
        assert kept[1].abs().max() < 10 * W.abs().max()


def test_a_core_beside_dependent_columns_is_refined_no_further_than_rounding() -> None:
    W, moment, shape = draw(8, 6), Moment(torch.eye(6, dtype=torch.float64)[None]), KernelShape.of((8, 6))
    basis = draw(8, 2, seed=5) @ draw(2, 5, seed=6)
    (core,) = refined(lambda cores: basis @ cores[0], [draw(5, 6, seed=7)], W, [moment], shape)
    best = W - basis @ torch.linalg.pinv(basis, rtol=1e-10) @ W
    torch.testing.assert_close(output_error(W - basis @ core, [moment], shape), best.square().sum())
    assert core.abs().max() < 10


def test_a_core_that_rounding_would_make_worse_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    format = Tucker(core="train").at_scale(KernelShape.of((8, 8)), 0.7)
    W, moment = draw(8, 8), moment_of(8)
    cores = format.decompose(W)
    monkeypatch.setattr(calibration, "_solved", lambda compose, cores, place, *_: 2 * cores[place])
    for core, expected in zip(refined(format.compose, cores, W, [moment], format.shape), cores, strict=True):
        assert core is expected


def test_a_single_core_is_refined_to_the_least_squares_solution() -> None:
    W, basis, moment, shape = draw(6, 9), draw(6, 2, seed=5), moment_of(9), KernelShape.of((6, 9))
    (core,) = refined(lambda cores: basis @ cores[0], [torch.zeros(2, 9, dtype=torch.float64)], W, [moment], shape)
    best = torch.linalg.lstsq(basis, W).solution
    error, least = (output_error(W - basis @ one, [moment], shape) for one in (core, best))
    torch.testing.assert_close(error, least, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("format", "module"),
    [
        (Product(KernelShape.of((16, 12, 3, 3)), 8), "split_kernel"),
        (Monarch().at_scale(KernelShape.of((16, 12, 3, 3)), 0.3), "calibration"),
    ],
)
def test_sweeps_go_on_as_long_as_they_gain_enough(format: Format, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    W, moment, constants = draw(16, 12, 3, 3), moment_of(108), f"factorized.formats.{module}"
    errors = []
    for sweeps in range(4):
        monkeypatch.setattr(f"{constants}.SWEEPS", sweeps)
        errors.append(output_error(W - format.compose(format.calibrate(W, [moment])), [moment], format.shape))
    assert errors[1] < 0.95 * errors[0]
    assert errors[2] < 0.98 * errors[1]
    monkeypatch.setattr(f"{constants}.WORTH_A_SWEEP", 0.99)  # no sweep gains as much
    last = output_error(W - format.compose(format.calibrate(W, [moment])), [moment], format.shape)
    assert errors[2] <= last <= errors[1]


def test_a_residual_calibrates_its_part_and_keeps_the_weight() -> None:
    W, moment = draw(12, 20).bfloat16(), moment_of(20)
    scheme = Residual(dtype=torch.float32)
    format = scheme.at_rank(scheme.kernel((12, 20)), 3)
    cores = format.calibrate(W, [moment])
    part = LowRank().at_rank(KernelShape.of((12, 20)), 3).calibrate(W, [moment])
    assert all(torch.equal(a, b) for a, b in zip(cores[:2], part, strict=True))
    torch.testing.assert_close(format.compose(cores), W, rtol=0, atol=0.02)


def test_weights_on_both_sides_share_one_error() -> None:
    """A table tied to an output layer: rows are looked up, columns are multiplied."""
    W, format = draw(40, 10), Product(KernelShape.of((40, 10)), 3)
    rows, columns = Moment(torch.logspace(0, -2, 40, dtype=torch.float64).unsqueeze(0), True), moment_of(10)
    both = [rows, columns]
    ours, *alone, spectral = (
        output_error(W - format.compose(cores), both, format.shape)
        for cores in (*[format.calibrate(W, moments) for moments in (both, [rows], [columns])], format.decompose(W))
    )
    assert ours < 0.98 * min(*alone, spectral)


def test_moments_of_one_kind_add_up_and_others_stay() -> None:
    a, b, c = moment_of(6), moment_of(6, samples=2), Moment(draw(1, 6).square(), True)
    first, second = added([a, c, b])
    torch.testing.assert_close(first.sums, a.sums + b.sums)
    assert not first.transposed
    assert second.transposed
    torch.testing.assert_close(second.sums, c.sums)


@pytest.mark.parametrize("extents", [(12, 30), (30, 12)])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_spectrum_of_outputs_is_what_the_best_products_of_every_rank_lose(
    extents: tuple[int, int], groups: int
) -> None:
    (m, n), moment = extents, moment_of(extents[1], groups)
    shape = KernelShape(groups * m, groups * n, (), groups)
    weight = draw(*shape.weight_shape)
    spectrum = output_spectrum(weight, [moment], shape)
    assert spectrum.shape == (min(m, n),)
    for rank in (0, 1, 5, min(m, n) - 1):
        best = sum(optimum(W, C, rank) for W, C in zip(weight.reshape(groups, m, n), moment.sums, strict=True))
        torch.testing.assert_close(spectrum[rank:].sum(), best, rtol=1e-2, atol=0)  # the ridge


def test_the_spectrum_of_a_kernel_split_over_both_factors_adds_up_to_its_outputs() -> None:
    shape = LowRank().kernel((6, 4, 3, 3))
    weight, moment = draw(6, 4, 3, 3), moment_of(36)
    spectrum = output_spectrum(weight, [moment], shape)
    torch.testing.assert_close(spectrum.sum(), output_error(weight, [moment], shape), rtol=1e-6, atol=0)
    assert (spectrum.diff() <= 0).all()


def test_a_group_without_inputs_does_not_outweigh_small_inputs_of_another() -> None:
    W, moment = draw(10, 8), moment_of(8, groups=2)
    inputs = 1e-12 * moment.sums * torch.tensor([0, 1]).view(2, 1, 1)
    spectrum = output_spectrum(W, [Moment(inputs)], KernelShape.of((10, 8), groups=2))
    alone = output_spectrum(W[5:], [Moment(inputs[1:])], KernelShape.of((5, 8)))
    torch.testing.assert_close(spectrum, alone, rtol=1e-6, atol=1e-6 * alone.sum().item())


def test_a_weight_or_inputs_of_zeros_have_a_finite_spectrum() -> None:
    shape = KernelShape(5, 4, (), 1)
    zeros = Moment(torch.zeros(1, 4, 4, dtype=torch.float64))
    assert not output_spectrum(torch.zeros(5, 4), [moment_of(4)], shape).any()
    torch.testing.assert_close(output_spectrum(draw(5, 4), [zeros], shape), torch.linalg.svdvals(draw(5, 4)).square())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weight_shape", [(6, 8), (12, 4), (8, 6, 1, 3)])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_corrected_weight_makes_of_other_inputs_what_the_weight_made_of_its_own(
    weight_shape: tuple[int, ...], groups: int, transposed: bool
) -> None:
    shape, W = KernelShape.of(weight_shape, groups), draw(*weight_shape)
    matrices = by_output(W, shape, transposed)  # (groups, outputs, inputs)
    x = draw(groups, 200, matrices.shape[2], seed=1)
    other = x + 0.5 * draw(*x.shape, seed=2)
    moment = Moment(other.mT @ other, transposed)
    found = corrected(W, x.mT @ other, moment, shape)
    best = torch.linalg.lstsq(other, x @ matrices.mT).solution.mT
    torch.testing.assert_close(by_output(found, shape, transposed), best, rtol=0, atol=1e-3)
    assert found.shape == W.shape


def test_a_corrected_weight_is_the_weight_where_inputs_are_the_same_or_unseen() -> None:
    shape, W = KernelShape.of((6, 8)), draw(6, 8)
    x, other = draw(20, 8, seed=1), draw(20, 8, seed=2)
    x[:, 5:] = other[:, 5:] = 0
    same, moved = (corrected(W, (x.mT @ one)[None], Moment((one.mT @ one)[None]), shape) for one in (x, other))
    torch.testing.assert_close(same, W, rtol=0, atol=0)
    torch.testing.assert_close(moved[:, 5:], W[:, 5:], rtol=0, atol=0)
    assert not torch.allclose(moved[:, :5], W[:, :5], atol=0.1)
    zeros = torch.zeros(1, 8, 8, dtype=torch.float64)
    assert torch.equal(corrected(W, zeros, Moment(zeros), shape), W)
