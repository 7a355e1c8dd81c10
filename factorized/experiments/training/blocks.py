"""Compiling a network block by block: blocks that are alike share one compiled program, so depth costs no time."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList)


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks that a network repeats: members of one container that have one class and layers inside.

    Blocks inside blocks are left out.
    """
    found: list[nn.Module] = []
    for container in [module for module in network.modules() if type(module) in CONTAINERS]:
        members = list(container.children())
        count = Counter(type(member) for member in members)
        found += [
            member
            for member in members
            if count[type(member)] > 1 and type(member) not in CONTAINERS and any(True for _ in member.children())
        ]
    inside = {module for block in found for module in block.modules() if module is not block}
    return [block for block in dict.fromkeys(found) if block not in inside]


class CompiledBlocks:
    """The blocks of a network, compiled for training; outside of ``in_use`` the network runs as it is."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = [
            (block, torch.compile(block.forward, fullgraph=True, dynamic=False)) for block in blocks
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the compiled blocks for a while."""
        # blocks of one class share the limit of programs, and at different ranks each block needs its own
        limit = max(torch._dynamo.config.recompile_limit, 2 * len(self._forwards))
        try:
            for block, forward in self._forwards:
                block.forward = forward
            with torch._dynamo.config.patch(recompile_limit=limit), warnings.catch_warnings():
                # the compiler looks at it whenever the input of a block was computed
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                yield
        finally:
            for block, _ in self._forwards:
                block.__dict__.pop("forward", None)  # the method of the class is behind it
