from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factorized.maths.folding import Folding, fold, nearly_equal
from factorized.maths.kernel import KernelShape


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
    folding = fold(KernelShape.of(weight), method)
    assert (folding.dims, folding.boundary, folding.kept) == (dims, boundary, kept)


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


def folding_of(dims: list[int], method: str) -> Folding:
    return Folding(KernelShape.of((dims[0], prod(dims[1:]))), tuple(dims), method)


METHODS = st.sampled_from(["tensor_train", "tucker"])
DIMS = st.lists(st.integers(1, 5), min_size=2, max_size=5)


@given(dims=DIMS, rank=st.integers(1, 40), method=METHODS)
def test_clipped_ranks_are_those_that_a_tensor_can_have(dims: list[int], rank: int, method: str) -> None:
    folding = folding_of(dims, method)
    ranks = folding.clipped(rank)
    assert all(1 <= r <= full for r, full in zip(ranks, folding.full_ranks, strict=True))
    assert folding.format(ranks).ranks == ranks
    if rank >= max(dims) and rank >= max(folding.full_ranks):
        assert ranks == folding.full_ranks


@settings(deadline=None, max_examples=60)
@given(data=st.data(), dims=DIMS, method=METHODS)
def test_clipped_ranks_are_the_ranks_of_the_unfoldings_of_a_random_tensor(
    data: st.DataObject, dims: list[int], method: str
) -> None:
    folding = folding_of(dims, method)
    asked = tuple(data.draw(st.integers(1, 8)) for _ in folding.full_ranks)
    tensor = folding.format(asked)
    torch.manual_seed(0)
    full = tensor.expand([torch.randn(shape, dtype=torch.float64) for shape in tensor.core_shapes])
    places = range(1, len(dims)) if method == "tensor_train" else range(len(dims))
    unfolded = [
        full.reshape(prod(dims[:k]), -1) if method == "tensor_train" else full.movedim(k, 0).flatten(1) for k in places
    ]
    assert tensor.ranks == tuple(int(torch.linalg.matrix_rank(matrix)) for matrix in unfolded)


@given(dims=DIMS, method=METHODS)
def test_raising_ranks_step_by_step_ends_at_full_rank_through_ranks_that_a_tensor_can_have(
    dims: list[int], method: str
) -> None:
    folding = folding_of(dims, method)
    ranks = folding.clipped(1)
    while steps := folding.raised(ranks):
        for step in steps:
            assert step != ranks
            assert all(new >= old for new, old in zip(step, ranks, strict=True))
            assert folding.clipped(step) == step
        ranks = steps[0]
    assert ranks == folding.full_ranks


def test_mixed_dimensions_have_no_boundary() -> None:
    assert fold(KernelShape.of((640, 640, 1, 1)), order=3).boundary is None
