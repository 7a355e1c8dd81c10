"""One compiled network for the factors of many ranks: weights are composed before it runs.

``torch.compile`` takes half a minute for a ResNet-32, and again for every other set of ranks. Here the dense network is
compiled once, with its kernels among the inputs; products are composed, and pruned weights masked, outside of it.
Training computes the same as layers that compose their weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class OneNetwork:
    """A dense network without the weights of its convolutions and linears, compiled for training.

    Args:
        dense: gives everything but those weights; it is copied.
        backend: of ``torch.compile``.
    """

    def __init__(self, dense: nn.Module, backend: str = "inductor") -> None:
        self.body = copy.deepcopy(dense)
        named = self.body.named_modules()
        self.layers = {name: module for name, module in named if isinstance(module, (nn.Conv2d, nn.Linear))}
        for layer in self.layers.values():
            del layer.weight
        self.compiled: Any = torch.compile(self.body, fullgraph=True, dynamic=False, backend=backend)

    def holding(self, network: nn.Module) -> Composing:
        """Return a network that trains the factors and weights of ``network``, and copies of all else in it."""
        expected = self.body.state_dict()
        self.body.load_state_dict({name: tensor for name, tensor in network.state_dict().items() if name in expected})
        return Composing(self, [network.get_submodule(name) for name in self.layers])


class Composing(nn.Module):
    """The one network, with weights that some modules hold: factorized layers compose them."""

    one: OneNetwork  # not a part of this module

    def __init__(self, one: OneNetwork, holders: Sequence[Any]) -> None:
        super().__init__()
        self.body, self.holders = one.body, nn.ModuleList(holders)
        for holder in holders:
            holder.bias = None  # the body has it
        self.__dict__["one"] = one

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width)
    ) -> Tensor:  # (batch, classes)
        """Compose the weights and run; compiled in training."""
        layers, holders = list(self.one.layers.values()), list[Any](self.holders)
        with torch.autocast(x.device.type, enabled=False):
            weights = [holder.weight.clone(memory_format=torch.contiguous_format) for holder in holders]
        for layer, weight in zip(layers, weights, strict=True):
            layer.__dict__["weight"] = weight
        try:
            found: Tensor = self._compiled(x) if self.training else self.body(x)
            return found
        finally:
            # a graph that is kept alive would bind a captured step to the stream of the one before
            for layer in layers:
                del layer.__dict__["weight"]

    def _compiled(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():  # the compiler looks for the gradients of composed weights, which have none
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            return self.one.compiled(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of what is trained, to be looked at."""
        return copy.deepcopy(nn.ModuleDict({"body": self.body, "holders": self.holders}), memo)
