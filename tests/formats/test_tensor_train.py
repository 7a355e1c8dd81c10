from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import tensorly
import torch
from tensorly.decomposition import tensor_train
from torch import Tensor

from factorized.formats.format import pull_back
from factorized.formats.kernel import KernelShape
from factorized.formats.tensor_train import (
    TrainFormat,
    full_train_ranks,
    tt_expand,
    tt_gradients,
    tt_halves,
    tt_norm_squared,
    tt_svd,
)
from factorized.testing import error

tensorly.set_backend("pytorch")
DIMS = [(6, 5), (4, 5, 6), (3, 4, 5, 2), (2, 3, 2, 3, 4)]


def randn(*extents: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*extents, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def train(dims: tuple[int, ...], ranks: tuple[int, ...]) -> TrainFormat:
    return TrainFormat(KernelShape(dims[0], prod(dims[1:])), dims, ranks)


def cores_of(dims: tuple[int, ...], rank: int, *batch: int) -> tuple[TrainFormat, list[Tensor]]:
    made = train(dims, tuple(min(rank, full) for full in full_train_ranks(dims)))
    return made, [randn(*batch, *shape) for shape in made.core_shapes]


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_decomposition_is_tensorlys(dims: tuple[int, ...], rank: int, dtype: torch.dtype, tolerance: float) -> None:
    tensor = randn(*dims, dtype=dtype)
    made, _ = cores_of(dims, rank)
    theirs = tensor_train(tensor, [1, *made.rank, 1])
    ours = tt_svd(tensor, made.rank)
    assert [core.shape for core in ours] == [core.shape for core in theirs]
    assert error(tt_expand(ours, 1), theirs.to_tensor()) < tolerance
    assert error(tt_norm_squared(ours), tensorly.norm(theirs.to_tensor()) ** 2) < tolerance


def test_a_large_tensor_is_decomposed_as_tensorly_does_and_at_random_nearly_as_well() -> None:
    tensor = randn(48, 40, 36)
    theirs = tensor_train(tensor, [1, 6, 5, 1]).to_tensor()
    made = train((48, 40, 36), (6, 5))
    assert error(made.expand(tt_svd(tensor, (6, 5), "exact")), theirs) < 1e-5
    lost, least = (tt_expand(tt_svd(tensor, (6, 5), m), 1) - tensor for m in ("randomized", "exact"))
    assert lost.norm() < 1.01 * least.norm()


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_it_is_exact_at_full_rank_and_orthonormal_but_for_the_last_core(
    dims: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    tensor = randn(3, *dims, dtype=dtype)
    cores = tt_svd(tensor, full_train_ranks(dims))
    for split in range(1, len(dims)):
        assert error(tt_expand(cores, split), tensor) < tolerance
    for core in cores[:-1]:
        columns = core.flatten(1, 2)
        identity = torch.eye(columns.shape[-1], dtype=dtype).expand(3, -1, -1)
        assert error(columns.mT @ columns, identity) < tolerance


def test_a_tensor_of_low_rank_is_recovered_and_a_batch_is_one_at_a_time() -> None:
    made, cores = cores_of((4, 5, 6, 3), 2, 7)
    tensors = made.expand(cores)
    found = tt_svd(tensors, made.rank)
    assert error(made.expand(found), tensors) < 1e-12
    for place, tensor in enumerate(tensors):
        alone = tt_svd(tensor, made.rank)
        for core, batched in zip(alone, found, strict=True):
            assert error(core, batched[place]) < 1e-9


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("rank", [1, 2, 30])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_norm_and_gradients_by_contraction_are_those_of_the_tensor(
    dims: tuple[int, ...], rank: int, batch: tuple[int, ...]
) -> None:
    made, cores = cores_of(dims, rank, *batch)
    squared = made.expand(cores).flatten(len(batch)).square().sum(-1)
    assert error(tt_norm_squared(cores), squared) < 1e-12
    assert error(made.norm_squared(cores), squared) < 1e-12
    leaves = [core.clone().requires_grad_() for core in cores]
    expected = torch.autograd.grad(made.expand(leaves).square().sum() / 2, leaves)
    for way in (tt_gradients(cores), pull_back(made.expand, cores), made.gradients(cores)):
        for actual, reference in zip(way, expected, strict=True):
            assert error(actual, reference) < 1e-12


def test_the_halves_are_the_unfolding() -> None:
    made, cores = cores_of((4, 5, 6, 3), 3)
    tensor = made.expand(cores)
    for split in (1, 2, 3):
        left, right = tt_halves(cores, split)
        assert left.shape[1] == right.shape[0] == made.rank[split - 1]
        assert error(left @ right, tensor.flatten(split).flatten(0, split - 1)) < 1e-12


def test_the_cheapest_order_is_taken_and_the_dearer_way_is_not() -> None:
    made = train((20, 32, 20, 32, 9), (5, 5, 5, 5))
    costs = {split: made._expand_macs(split) for split in range(1, 5)}
    assert made.compose_macs == min(costs.values()) < max(costs.values())
    assert made.contract_macs < made.compose_macs  # the norm of a thin train never forms the tensor
    assert train((8, 8), (8,)).contract_macs > train((8, 8), (8,)).compose_macs  # and of a full one does


def test_contracting_never_makes_a_tensor_as_large_as_the_whole() -> None:
    made, cores = cores_of((8, 8, 8, 8), 3)
    largest = max(core.numel() for core in cores)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            seen.append(result.numel())
            return result

    with Watch():
        made.norm_squared(cores)
        made.gradients(cores)
    assert max(seen) <= largest < made.shape.numel / 50


def test_a_decomposition_has_cores_of_one_norm_and_keeps_the_type() -> None:
    made = train((4, 5, 6), (2, 3))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        cores = made.decompose_tensor(randn(2, 4, 5, 6, dtype=dtype))
        assert {core.dtype for core in cores} == {dtype}
        norms = [core.double().flatten(1).norm(dim=1) for core in cores]
        for one, other in pairwise(norms):
            assert error(one, other) < 1e-2
    zero = made.decompose_tensor(torch.zeros(4, 5, 6))
    assert made.expand(zero).abs().max() == 0
    assert zero[0].abs().max() > 0  # so that a gradient can reach the last core


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_refused(bad: float) -> None:
    tensor = randn(4, 5, 6)
    tensor[1, 2, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        tt_svd(tensor, (2, 2))


def test_a_rank_above_full_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank must be in 1\.\.4"):
        tt_svd(randn(4, 5, 6), (5, 6))
