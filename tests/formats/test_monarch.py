from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.formats.convolution import Geometry
from factorized.formats.kernel import KernelShape
from factorized.formats.monarch import MonarchFormat
from factorized.formats.product import Product
from factorized.testing import error

# (out, in/groups, *size), groups, blocks, rank
CASES = [((12, 8), 1, 4, 2), ((6, 9), 1, 3, 1), ((8, 4, 3), 1, 2, 3), ((4, 6, 3, 2), 2, 2, 2), ((5, 7), 1, 1, 3)]


def randn(*extents: int, seed: int = 0) -> Tensor:
    return torch.randn(*extents, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cores_of(format: MonarchFormat, *batch: int) -> list[Tensor]:
    return [randn(*batch, *extents, seed=n) for n, extents in enumerate(format.cores.values())]


def blocks_of(weight: Tensor, blocks: int) -> list[list[Tensor]]:
    return [list(rows.chunk(blocks, dim=1)) for rows in weight.chunk(blocks)]


@pytest.mark.parametrize(("weight_shape", "groups", "blocks", "rank"), CASES)
def test_the_projection_is_the_best_of_every_block(
    weight_shape: tuple[int, ...], groups: int, blocks: int, rank: int
) -> None:
    format, weight = MonarchFormat(KernelShape.of(weight_shape, groups), blocks, rank), randn(*weight_shape)
    found = format.compose(format.decompose(weight))
    for rows, found_rows in zip(blocks_of(weight, blocks), blocks_of(found, blocks), strict=True):
        for block, approximation in zip(rows, found_rows, strict=True):
            lost = torch.linalg.svdvals(block.flatten(1))[rank:].square().sum()
            assert abs((block - approximation).square().sum() - lost) < 1e-12 * block.square().sum()
            assert torch.linalg.matrix_rank(approximation.flatten(1)) <= rank
    again = format.compose(format.decompose(found))
    assert error(again, found) < 1e-12


@pytest.mark.parametrize("weight_shape", [(12, 8), (6, 4, 3, 2)])
def test_with_one_block_it_is_low_rank(weight_shape: tuple[int, ...]) -> None:
    shape, weight = KernelShape.of(weight_shape, kind="channel"), randn(*weight_shape)
    monarch, product = MonarchFormat(shape, 1, 3), Product(shape, 3)
    assert monarch.numel == product.numel
    assert error(monarch.compose(monarch.decompose(weight)), product.compose(product.decompose(weight))) < 1e-12


def test_the_chain_is_two_block_diagonal_matrices_around_a_channel_shuffle() -> None:
    format = MonarchFormat(KernelShape(12, 8), blocks=4, rank=2)
    L, R = cores_of(format)
    middle = nn.ChannelShuffle(4 * 2)(torch.eye(32, dtype=torch.float64).unsqueeze(-1)).squeeze(-1).mT
    found = torch.block_diag(*L.chunk(4)) @ middle @ torch.block_diag(*R.chunk(4))
    assert error(found, format.compose((L, R))) < 1e-12


def test_plain_layers_and_torchs_shuffle_compute_a_convolution() -> None:
    format = MonarchFormat(KernelShape.of((6, 4, 3, 3)), blocks=2, rank=2)
    cores, x, bias = cores_of(format), randn(2, 4, 9, 7), randn(6)
    geometry = Geometry((2, 1), ((1, 1), (0, 0)), (1, 2))
    composed = format.run("composed", x, cores, bias, geometry)
    assert error(format.run("chain", x, cores, bias, geometry), composed) < 1e-12
    first, second = format.chain_weights(cores)
    y = nn.functional.conv2d(x, first, None, (2, 1), (1, 0), (1, 2), groups=2)
    y = nn.functional.conv2d(nn.ChannelShuffle(format.chain[0].shuffle)(y), second, bias, groups=2)  # type: ignore[index]
    assert error(y, composed) < 1e-12


@pytest.mark.parametrize(("weight_shape", "groups", "blocks", "rank"), CASES)
def test_every_rank_costs_the_outputs_and_inputs_once_for_every_block_beside_them(
    weight_shape: tuple[int, ...], groups: int, blocks: int, rank: int
) -> None:
    out, inputs, *size = weight_shape
    format = MonarchFormat(KernelShape.of(weight_shape, groups), blocks, rank)
    taps = torch.Size(size).numel()
    assert format.numel == rank * blocks * (out + inputs * taps) == sum(core.numel() for core in cores_of(format))


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5])
def test_a_budget_is_met(ratio: float) -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(128, 64, bias=False))
    plan = fz.plan(model, ratio=ratio, scheme=fz.Monarch(), keep_first_and_last=False)
    dense = sum(parameter.numel() for parameter in model.parameters())
    fz.factorize(model, plan)
    after = sum(parameter.numel() for parameter in model.parameters())
    assert 0.9 * ratio * dense < after <= ratio * dense


def test_blocks_are_chosen_so_that_a_rank_is_a_small_step() -> None:
    for weight_shape in [(512, 512), (64, 64, 3, 3), (10, 64), (7, 5)]:
        shape = KernelShape.of(weight_shape)
        format = fz.Monarch().at_scale(shape, 0.5)
        assert format.blocks == 1 or format.numel / format.rank <= 0.03 * shape.numel
        assert fz.Monarch().at_scale(shape, 1e-9).rank == 1
        full = fz.Monarch().at_scale(shape, 100)
        assert full.rank == fz.Monarch().reference(shape)
        assert full.raised() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MonarchFormat(KernelShape(6, 8), 3, 1),
            "blocks must divide the outputs and inputs of a 6x8 weight, got 3",
        ),
        (lambda: MonarchFormat(KernelShape(6, 8), 2, 0), "rank must be a whole number of at least 1, got 0"),
        (lambda: MonarchFormat(KernelShape(6, 8), 2, 4), "rank must be in 1..3 for 2x2 blocks of a 6x8 weight, got 4"),
        (lambda: fz.Monarch(blocks=0), "blocks must be a whole number of at least 1, got 0"),
        (
            lambda: fz.Monarch(2).at_rank(KernelShape(6, 8), 4),
            "rank must be in 1..3 for 2x2 blocks of a 6x8 weight, got 4",
        ),
        (
            lambda: fz.Monarch(2).at_rank(KernelShape(6, 8), (1, 2)),
            "rank must be one whole number (the rank of every block), got (1, 2)",
        ),
        (lambda: fz.Monarch(2).at_rank(KernelShape(6, 8), True), "rank must be a whole number of at least 1, got True"),
        (
            lambda: fz.Monarch(4).at_rank(KernelShape(6, 8), 1),
            "blocks must divide the outputs and inputs of a 6x8 weight, got 4",
        ),
    ],
)
def test_wrong_blocks_and_ranks_say_what_is_allowed(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_layers_that_do_not_divide_into_the_blocks_stay_dense() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 63))
    plan = fz.plan(model, rank_scale=0.1, scheme=fz.Monarch(blocks=4), keep_first_and_last=False)
    assert [entry.name for entry in plan.selected] == ["0"]
