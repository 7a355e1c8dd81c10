"""Weights that are parameters of a larger module, seen as layers: gates of recurrent networks, stacks of experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from factorized.nn.model import dotted

EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")  # stacks (experts, rows, columns) in transformers


class HeldWeight(nn.Module):
    """A parameter of a larger module, seen as a layer: ``weight`` is a stack of matrices, its blocks. Abstract."""

    form_kind: ClassVar[str]  # what a decay calls the product
    weight: nn.Parameter
    bias: None

    def __init__(self, weight: nn.Parameter, groups: int) -> None:
        super().__init__()
        self.weight, self.groups = weight, groups
        self.register_parameter("bias", None)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape of the blocks, stacked by rows: (all rows, columns)."""
        return self.weight.shape[:-1].numel(), self.weight.shape[-1]

    @abstractmethod
    def positions(self, arguments: Sequence[Any]) -> int:
        """Return how often the whole weight is applied when the module is called with these arguments."""


class RecurrentWeight(HeldWeight):
    """The gates of a recurrent layer on its input or on its state, one block each."""

    form_kind = "recurrent"

    def positions(self, arguments: Sequence[Any]) -> int:
        """Return the steps of all sequences."""
        x = arguments[0].data  # of a packed sequence, those that are not padding
        return int(x.shape[:-1].numel())


class ExpertWeights(HeldWeight):
    """The matrices of all experts, one block each."""

    form_kind = "experts"

    def positions(self, arguments: Sequence[Any]) -> int:
        """Return the number of (token, expert) pairs, each of which uses one block, per expert."""
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        chosen = [value.numel() for value in tensors if not value.is_floating_point()]
        return -(-chosen[0] // self.groups) if chosen else tensors[0].shape[:-1].numel()


def held_weights(module: nn.Module) -> dict[str, HeldWeight]:
    """Return the weights that ``module`` itself holds as parameters, by name."""
    parameters = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        gates = {key: p for key, p in parameters.items() if key.startswith("weight_")}
        return {
            key: RecurrentWeight(p, 1 if key.startswith("weight_hr") else p.shape[0] // module.hidden_size)
            for key, p in gates.items()
        }
    stacks = {key: p for key, p in parameters.items() if key in EXPERTS and p.dim() == 3}
    return {key: ExpertWeights(p, p.shape[0]) for key, p in stacks.items()}


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module of ``model`` under all of its names, each followed by the weights that it holds."""
    found: dict[str, nn.Module] = {}
    held: dict[nn.Module, dict[str, HeldWeight]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = module
        held[module] = held.get(module) or held_weights(module)
        found |= {dotted(name, key): weight for key, weight in held[module].items()}
    return found
