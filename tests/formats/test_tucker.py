from __future__ import annotations

from math import prod

import pytest
import tensorly
import torch
from tensorly.decomposition import tucker
from tensorly.decomposition._tucker import initialize_tucker
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from factorized.formats.format import pull_back
from factorized.formats.hosvd import hosvd, tucker_expand, tucker_gradients, tucker_norm_squared
from factorized.formats.kernel import KernelShape
from factorized.formats.tucker import CoreKind, TuckerFormat
from factorized.testing import error

tensorly.set_backend("pytorch")
CASES = [((6, 5), (3, 2)), ((4, 5, 6), (2, 3, 4)), ((3, 4, 5, 2), (2, 2, 3, 1))]


def randn(*extents: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*extents, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def format_of(dims: tuple[int, ...], ranks: tuple[int, ...], kept: int = 0, core: CoreKind = "whole") -> TuckerFormat:
    """Return the format of a weight that is folded into ``dims``, of which the last are those of its kernel."""
    channels = dims[: len(dims) - kept]
    return TuckerFormat(KernelShape(channels[0], prod(channels[1:]), dims[len(channels) :]), dims, ranks, core)


@pytest.mark.parametrize(("dims", "ranks"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_decomposition_is_tensorlys(
    dims: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    tensor = randn(*dims, dtype=dtype)
    core, factors = hosvd(tensor, ranks)
    their_core, their_factors = initialize_tucker(tensor, list(ranks), list(range(len(dims))), None, init="svd")
    theirs = tensorly.tucker_to_tensor((their_core, their_factors))
    assert core.shape == their_core.shape
    assert error(tucker_expand(core, factors), theirs) < tolerance
    assert error(tucker_norm_squared(core, factors), theirs.square().sum()) < tolerance


@pytest.mark.parametrize(("dims", "ranks"), CASES[1:])
def test_the_refinement_is_tensorlys_iteration_and_never_worse(dims: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    tensor = randn(*dims)
    errors = []
    for rounds in (0, 1, 100):
        core, factors = hosvd(tensor, ranks, refinements=rounds)
        errors.append((tucker_expand(core, factors) - tensor).norm().item())
    assert errors[2] <= errors[1] < errors[0]
    theirs = tensorly.tucker_to_tensor(tucker(tensor, list(ranks), n_iter_max=100, tol=0, init="svd"))
    assert abs(errors[2] - (theirs - tensor).norm().item()) < 1e-5


@pytest.mark.parametrize(("dims", "ranks"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_it_is_exact_at_full_rank_with_orthonormal_factors(
    dims: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    tensor = randn(3, *dims, dtype=dtype)
    core, factors = hosvd(tensor, dims, refinements=1)
    assert error(tucker_expand(core, factors), tensor) < tolerance
    for factor in factors:
        assert factor is not None
        identity = torch.eye(factor.shape[-1], dtype=dtype).expand(3, -1, -1)
        assert error(factor.mT @ factor, identity) < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("refinements", [0, 2])
def test_half_types_are_decomposed_in_float32(dtype: torch.dtype, refinements: int) -> None:
    tensor = randn(6, 5, 4).to(dtype)
    core, factors = hosvd(tensor, (6, 5, 4), refinements)
    assert {part.dtype for part in (core, *factors) if part is not None} == {torch.float32}
    assert error(tucker_expand(core, factors), tensor) < 1e-5
    for kind in ("whole", "train"):
        cores = format_of((6, 5, 4), (3, 3, 3), core=kind).decompose_tensor(tensor)  # type: ignore[arg-type]
        assert {part.dtype for part in cores} == {dtype}


def test_a_rank_that_the_other_modes_cannot_fill_is_completed() -> None:
    core, factors = hosvd(randn(9, 2, 2), (9, 2, 2))  # the first unfolding has four columns
    assert error(tucker_expand(core, factors), randn(9, 2, 2)) < 1e-12


def test_a_batch_is_one_at_a_time_and_kept_modes_have_no_factor() -> None:
    tensors = randn(5, 4, 6, 3, 3)
    core, factors = hosvd(tensors, (2, 3, None, None))
    assert core.shape == (5, 2, 3, 3, 3)
    assert factors[2:] == [None, None]
    for place, tensor in enumerate(tensors):
        alone = tucker_expand(*hosvd(tensor, (2, 3, None, None)))
        assert error(tucker_expand(core, factors)[place], alone) < 1e-10


@pytest.mark.parametrize("core", ["whole", "train"])
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_norm_and_gradients_by_contraction_are_those_of_the_tensor(
    core: CoreKind, kept: int, full: bool, batch: tuple[int, ...]
) -> None:
    dims = (4, 5, 6)
    ranks = (dims if full else (2, 3, 4))[: 3 - kept]
    made = format_of(dims, ranks, kept, core)
    cores = [randn(*batch, *shape) for shape in made.core_shapes]
    squared = made.expand(cores).flatten(len(batch)).square().sum(-1)
    assert error(made.contracted_norm_squared(cores), squared) < 1e-12
    assert error(made.norm_squared(cores), squared) < 1e-12
    leaves = [part.clone().requires_grad_() for part in cores]
    expected = torch.autograd.grad(made.expand(leaves).square().sum() / 2, leaves)
    for way in (made.contracted_gradients(cores), pull_back(made.expand, cores), made.gradients(cores)):
        for actual, reference in zip(way, expected, strict=True):
            assert error(actual, reference) < 1e-12


def test_gradients_of_kept_modes_are_none() -> None:
    core, factor = randn(2, 3, 3), randn(4, 2)
    of_core, of_factors = tucker_gradients(core, [factor, None, None])
    assert of_factors[1:] == [None, None]
    assert error(of_core, torch.einsum("rij,ar,as->sij", core, factor, factor)) < 1e-12


@pytest.mark.parametrize("core", ["whole", "train"])
@pytest.mark.parametrize(("dims", "ranks", "kept"), [((4, 5, 6), (2, 3, 4), 0), ((6, 4, 3, 3), (3, 2), 2)])
def test_a_train_for_a_core_stands_for_the_same_tensor(
    core: CoreKind, dims: tuple[int, ...], ranks: tuple[int, ...], kept: int
) -> None:
    tensor = randn(2, *dims)
    made = format_of(dims, ranks, kept, core)
    cores = made.decompose_tensor(tensor)
    assert [tuple(part.shape[1:]) for part in cores] == list(made.core_shapes)
    expected = tucker_expand(*hosvd(tensor, (*ranks, *[None] * kept)))
    assert error(made.expand(cores), expected) < 1e-12
    norms = [part.flatten(1).norm(dim=1) for part in cores]
    assert all(error(norm, norms[0]) < 1e-10 for norm in norms)


def test_a_train_for_a_core_has_the_ranks_that_the_tensor_would_need() -> None:
    made = format_of((80, 80, 64), (17, 17, 14), core="train")
    assert made.core_shapes == ((1, 17, 80), (80, 17, 14), (14, 14, 1), (80, 17), (80, 17), (64, 14))


@pytest.mark.parametrize(
    ("dims", "ranks", "standing"),
    [((60, 8, 30), (2, 7, 10), False), ((50, 64, 32), (34, 44, 22), True), ((80, 80, 64), (54, 54, 44), True)],
)
def test_the_products_are_in_the_cheapest_order_unless_that_copies_to_save_little(
    dims: tuple[int, ...], ranks: tuple[int, ...], standing: bool
) -> None:
    made = format_of(dims, ranks)
    growth = [(d, r) for d, r in zip(made.dims, made.rank, strict=True)]
    costs = {}
    for order in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]:
        extents, macs = list(made.rank), 0
        for mode in order:
            extents[mode] = growth[mode][0]
            macs += extents[0] * extents[1] * extents[2] * growth[mode][1]
        costs[order] = macs
    assert made.compose_macs == costs[made.order]
    assert (made.order == (0, 1, 2)) == standing == (costs[0, 1, 2] <= 1.25 * min(costs.values()))
    assert standing or costs[made.order] == min(costs.values())


@pytest.mark.parametrize(("dims", "ranks", "kept"), [((4, 5, 6), (2, 3, 4), 0), ((8, 6, 3, 3), (4, 3), 2)])
def test_gradients_by_contraction_cost_what_is_counted(
    dims: tuple[int, ...], ranks: tuple[int, ...], kept: int
) -> None:
    tensor = format_of(dims, ranks, kept)
    cores = [randn(*shape) for shape in tensor.core_shapes]
    with FlopCounterMode(display=False) as counter:
        tensor.contracted_gradients(cores)
    assert counter.get_total_flops() == 2 * tensor.gradient_macs


def test_gradients_near_full_rank_go_through_the_tensor() -> None:
    for rank, contracts in ((24, True), (31, False)):
        tensor = format_of((32,) * 4, (rank,) * 4)
        assert (tensor.gradient_macs <= 3 * tensor.compose_macs) == contracts
