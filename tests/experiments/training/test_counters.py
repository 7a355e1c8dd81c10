"""Counters of batch normalization: kept out of compiled code, with the same numbers in the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from factorized.experiments.training.counters import counted_at_once


class Own(nn.BatchNorm1d):
    """A layer that counts in its own way."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 10
        return super().forward(input)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4, track_running_stats=False)]
    return nn.Sequential(*layers, nn.BatchNorm1d(4).eval(), Own(4), nn.BatchNorm1d(4))


def test_every_state_is_that_of_layers_that_count_themselves() -> None:
    plain, at_once = network(), network()
    run = counted_at_once(at_once)(at_once.forward)
    for _ in range(3):
        x = torch.randn(8, 4)
        assert torch.equal(plain(x), run(x))
    for (name, expected), (_, found) in zip(plain.state_dict().items(), at_once.state_dict().items(), strict=True):
        assert torch.equal(expected, found), name
    assert at_once[0].num_batches_tracked == 3


def test_a_step_that_fails_leaves_the_counters() -> None:
    layers = network()
    with pytest.raises(ValueError, match="stopped"), counted_at_once(layers):
        raise ValueError("stopped")
    assert layers[0].num_batches_tracked == 0
    assert [name for name, _ in layers.named_buffers()] == [name for name, _ in network().named_buffers()]


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_does_not_count() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    programs: list[GraphModule] = []

    def keep(program: GraphModule, example: list[Any]) -> Any:
        programs.append(program)
        return program.forward

    run = counted_at_once(layers)(torch.compile(layers, backend=keep, fullgraph=True))
    for _ in range(2):
        run(torch.randn(8, 4))
    (program,) = programs
    called = [getattr(node.target, "__name__", node.target) for node in program.graph.nodes]  # not addresses
    assert not [name for name in called if "add" in name]
    assert [int(layer.num_batches_tracked) for layer in layers] == [2, 2]
