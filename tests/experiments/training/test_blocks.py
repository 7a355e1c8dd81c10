"""Which blocks a network repeats, and how they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.experiments.models.build import build_model
from factorized.experiments.models.resnet import Block
from factorized.experiments.training.blocks import CompiledBlocks, repeated_blocks


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace as ``torch.compile`` does, and run what was traced as it is."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


def programs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("name", "blocks"), [("resnet20", 9), ("resnet32x2", 15), ("wrn28-10", 12), ("vgg19", 0)])
def test_residual_networks_repeat_blocks(name: str, blocks: int) -> None:
    with torch.device("meta"):
        network = build_model(name, 10, 32, 3)
    assert len(repeated_blocks(network)) == blocks


def test_a_block_has_layers_and_is_counted_once() -> None:
    outer = nn.ModuleList(
        [nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3) for _ in range(2)]
    )
    assert repeated_blocks(outer) == list(outer)  # not the layers inside them
    shared, other = Block(4, 4, 1, "pad"), Block(4, 4, 1, "pad")
    assert repeated_blocks(nn.Sequential(nn.Sequential(shared, other), nn.ModuleList([shared, other]))) == [
        shared,
        other,
    ]
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []


def test_blocks_of_one_shape_share_a_program() -> None:
    network = nn.Sequential(*(Block(4, 4, 1, "pad") for _ in range(5)), Block(4, 8, 2, "pad")).train()
    fz.factorize(network, rank=2, keep_first_and_last=False)
    expected = deepcopy(network)
    blocks, x = CompiledBlocks(repeated_blocks(network)), torch.randn(2, 4, 8, 8, requires_grad=True)
    with blocks.in_use():
        torch.testing.assert_close(network(x), expected(x))
    assert programs() == 2


def test_blocks_at_different_ranks_may_need_more_programs_than_torch_allows_by_default() -> None:
    network = nn.Sequential(*(Block(16, 16, 1, "pad") for _ in range(10)))
    for rank, block in enumerate(network, 1):
        fz.factorize(block, rank=rank, keep_first_and_last=False)
    with CompiledBlocks(list(network)).in_use():
        network(torch.randn(2, 16, 4, 4))
    assert programs() == 10 > torch._dynamo.config.recompile_limit


def test_a_network_runs_as_it_is_elsewhere_even_after_an_error() -> None:
    network = nn.Sequential(Block(4, 4, 1, "pad"), Block(4, 4, 1, "pad"))
    blocks = CompiledBlocks(list(network))
    with pytest.raises(RuntimeError, match="interrupted"), blocks.in_use():
        raise RuntimeError("interrupted")
    network(torch.randn(2, 4, 8, 8))
    assert programs() == 0
    assert all("forward" not in vars(block) for block in network)
