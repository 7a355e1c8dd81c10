from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import factorized as fz
from factorized.formats.folding import TensorScheme, nearly_equal
from factorized.formats.kernel import KernelShape
from factorized.formats.tensor_format import TensorFormat

SCHEMES: dict[str, type[TensorScheme]] = {"tensor_train": fz.TensorTrain, "tucker": fz.Tucker}


@pytest.mark.parametrize(
    ("weight", "method", "dims", "boundary", "kept"),
    [
        ((640, 640), "tensor_train", (20, 32, 20, 32), 2, 0),
        ((640, 640), "tucker", (20, 32, 20, 32), 2, 0),
        ((7, 12), "tensor_train", (7, 3, 4), 1, 0),
        ((7, 5), "tucker", (7, 5), 1, 0),
        ((12, 8, 3, 3), "tensor_train", (3, 4, 2, 4, 9), 2, 0),
        ((12, 8, 3, 3), "tucker", (12, 8, 3, 3), 1, 2),
        ((12, 8, 1, 1), "tensor_train", (3, 4, 2, 4), 2, 0),
        ((12, 8, 1, 1), "tucker", (12, 8, 1, 1), 1, 2),
        ((1, 1), "tensor_train", (1, 1), 1, 0),
    ],
)
def test_chosen_dimensions_keep_outputs_and_inputs_apart(
    weight: tuple[int, ...], method: str, dims: tuple[int, ...], boundary: int, kept: int
) -> None:
    format = SCHEMES[method]().at_rank(KernelShape.of(weight), 1)
    assert isinstance(format, TensorFormat)
    assert (format.dims, format.boundary, getattr(format, "kept", 0)) == (dims, boundary, kept)


@pytest.mark.parametrize(
    ("numel", "order", "dims"),
    [
        (640 * 640, 3, (80, 80, 64)),
        (160 * 16, 3, (16, 16, 10)),
        (320 * 320, 3, (50, 64, 32)),
        (64, 3, (4, 4, 4)),
        (64, 2, (8, 8)),
        (7, 3, (7, 1, 1)),
        (1, 2, (1, 1)),
    ],
)
def test_nearly_equal_dimensions_are_the_papers(numel: int, order: int, dims: tuple[int, ...]) -> None:
    assert nearly_equal(numel, order) == dims


@given(numel=st.integers(1, 10**6), order=st.integers(2, 6))
def test_nearly_equal_dimensions_multiply_to_the_whole(numel: int, order: int) -> None:
    dims = nearly_equal(numel, order)
    assert len(dims) == order
    assert prod(dims) == numel


def format_of(dims: list[int], method: str) -> TensorFormat:
    """Return the format of rank 1 of a weight that is folded into ``dims``."""
    return SCHEMES[method](dims=tuple(dims)).smallest(KernelShape.of((dims[0], prod(dims[1:]))), tuple(dims))


METHODS = st.sampled_from(["tensor_train", "tucker"])
DIMS = st.lists(st.integers(1, 5), min_size=2, max_size=5)


@given(dims=DIMS, rank=st.integers(1, 40), method=METHODS)
def test_clipped_ranks_are_those_that_a_tensor_can_have(dims: list[int], rank: int, method: str) -> None:
    format = format_of(dims, method).clipped(rank)
    assert all(1 <= r <= full for r, full in zip(format.rank, format.full_ranks, strict=True))
    assert format.clipped(format.rank) == format
    if rank >= max(dims) and rank >= max(format.full_ranks):
        assert format.rank == format.full_ranks


@settings(max_examples=60)
@given(data=st.data(), dims=DIMS, method=METHODS)
def test_clipped_ranks_are_the_ranks_of_the_unfoldings_of_a_random_tensor(
    data: st.DataObject, dims: list[int], method: str
) -> None:
    start = format_of(dims, method)
    tensor = start.clipped(tuple(data.draw(st.integers(1, 8)) for _ in start.full_ranks))
    torch.manual_seed(0)
    full = tensor.expand([torch.randn(shape, dtype=torch.float64) for shape in tensor.core_shapes])
    places = range(1, len(dims)) if method == "tensor_train" else range(len(dims))
    unfolded = [
        full.reshape(prod(dims[:k]), -1) if method == "tensor_train" else full.movedim(k, 0).flatten(1) for k in places
    ]
    assert tensor.rank == tuple(int(torch.linalg.matrix_rank(matrix)) for matrix in unfolded)


@given(dims=DIMS, method=METHODS)
def test_raising_ranks_step_by_step_ends_at_full_rank_through_ranks_that_a_tensor_can_have(
    dims: list[int], method: str
) -> None:
    format = format_of(dims, method)
    while steps := format.raised():
        for step in steps:
            assert step.height > format.height
            assert all(new >= old for new, old in zip(step.rank, format.rank, strict=True))
            assert step.clipped(step.rank) == step
        format = steps[0]
    assert format.rank == format.full_ranks


@given(dims=DIMS, method=METHODS)
def test_lowering_ranks_step_by_step_ends_at_rank_one(dims: list[int], method: str) -> None:
    format = format_of(dims, method).clipped(100)
    while steps := format.lowered():
        assert all(step.height < format.height and step.clipped(step.rank) == step for step in steps)
        format = steps[-1]
    assert set(format.rank) == {1}


def test_mixed_dimensions_have_no_boundary() -> None:
    format = fz.TensorTrain(order=3).at_rank(KernelShape.of((640, 640, 1, 1)), 1)
    assert isinstance(format, TensorFormat)
    assert format.boundary is None
    assert format.chain is None


WEIGHT = KernelShape.of((8, 12))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fz.TensorTrain().at_rank(WEIGHT, 0), "up to (2, 8, 4) for dims (2, 4, 3, 4) (tensor_train), got 0"),
        (lambda: fz.Tucker().at_rank(WEIGHT, -2), "up to (2, 4, 3, 4) for dims (2, 4, 3, 4) (tucker), got -2"),
        (lambda: fz.TensorTrain().at_rank(WEIGHT, (2, 0, 2)), "(tensor_train), got (2, 0, 2)"),
        (lambda: fz.TensorTrain().at_rank(WEIGHT, 2.5), "(tensor_train), got 2.5"),  # type: ignore[arg-type]
        (lambda: fz.TensorTrain().at_rank(WEIGHT, True), "(tensor_train), got True"),
        (lambda: fz.TensorTrain().at_rank(WEIGHT, (2, 2)), "at least 1, or 3 of them, up to (2, 8, 4)"),
        (lambda: fz.Tucker().at_rank(WEIGHT, (2, 2)), "or 4 of them, up to (2, 4, 3, 4) for dims (2, 4, 3, 4)"),
        (
            lambda: fz.TensorTrain(dims=(8, 11)).at_rank(WEIGHT, 2),
            "dims (8, 11) multiply to 88, but the weight 8x12 has 96 entries; give dims whose product is 96",
        ),
        (lambda: fz.TensorTrain(dims=(96,)), "dims must be a tuple of at least two whole numbers of at least 1"),
        (lambda: fz.TensorTrain(dims=(8, 0)), "dims must be a tuple of at least two whole numbers"),
        (lambda: fz.TensorTrain(dims=(96, True)), "dims must be a tuple of at least two whole numbers"),
        (lambda: fz.TensorTrain(dims="8x12"), "dims must be a tuple of at least two whole numbers"),  # type: ignore[arg-type]
        (lambda: fz.TensorTrain(order=1), "order must be a whole number of at least 2"),
        (lambda: fz.TensorTrain(dims=(8, 12), order=2), "give dims or order, not both"),
        (lambda: fz.TensorTrain(separable=1), "separable must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: fz.Tucker(core="thin"), "core must be"),  # type: ignore[arg-type]
        (lambda: fz.Tucker(refinements=-1), "refinements must be a whole number of at least 0, got -1"),
    ],
)
def test_wrong_settings_say_what_is_allowed(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("method", "shape", "rank", "real"),
    [
        ("tensor_train", (8, 12), 9, (2, 8, 4)),
        ("tucker", (8, 12), (9, 2, 9, 9), (2, 2, 3, 4)),
        # and a rank that its neighbours do not allow
        ("tensor_train", (36, 36), (1, 30, 1), (1, 6, 1)),
        ("tensor_train", (36, 36), (6, 1, 6), (6, 1, 6)),
        ("tucker", (36, 36), (1, 6, 2, 2), (1, 4, 2, 2)),
    ],
)
def test_ranks_above_what_the_dimensions_allow_are_clipped(
    method: str, shape: tuple[int, int], rank: Any, real: tuple[int, ...]
) -> None:
    assert SCHEMES[method]().at_rank(KernelShape.of(shape), rank).rank == real


def test_a_scheme_says_which_ranks_it_clips() -> None:
    assert fz.TensorTrain().clipped(WEIGHT, None, 9) == "(8x12): (9, 9, 9) is clipped to (2, 8, 4)"
    assert fz.TensorTrain().clipped(WEIGHT, None, 2) is None


def test_the_cores_of_a_long_train_are_drawn_without_overflow() -> None:
    format = fz.TensorTrain(dims=(*[2] * 18, *[1] * 40)).at_rank(KernelShape.of((512, 512)), 200)
    layer = fz.FactorizedLinear(512, 512, format, init="normal")
    assert 0.5 < layer.weight.square().mean() * 256 < 2


def test_the_cores_of_a_long_and_thick_train_are_drawn_without_underflow() -> None:
    ranks = tuple([min(2**k, 2 ** (24 - k), 256) for k in range(1, 24)])
    format = fz.TensorTrain(dims=(2,) * 24).at_rank(KernelShape.of((4096, 4096)), ranks)
    for core in fz.FactorizedLinear(4096, 4096, format, init="normal").factors:
        assert core.isfinite().all()
        assert core.norm() > 1e-3
