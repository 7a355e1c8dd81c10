"""Reading a dense layer: that it is one, its weight, the format asked for it, and what users added to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from factorized.formats.format import Format
from factorized.formats.kernel import KernelShape, Kind
from factorized.formats.product import Product

CALL_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def format_of(
    weight_shape: tuple[int, ...], format: Format | int, *, groups: int = 1, kind: Kind = "spatial", depth: int = 0
) -> Format:
    """Return the format for a weight: the one given, checked, or the product of a given rank."""
    if not isinstance(format, Format):
        return Product(KernelShape.of(weight_shape, groups, kind), format, depth)
    if format.shape.weight_shape != weight_shape or format.shape.groups != groups:
        raise ValueError(
            f"the format is for a weight {format.shape} with groups={format.shape.groups}, and the layer's is "
            f"{'x'.join(map(str, weight_shape))} with groups={groups}; make one for this layer"
        )
    return format


def added_attributes(module: nn.Module, *arguments: object) -> dict[str, object]:
    """Return the attributes that were set on a module after it was made: those that one of these arguments has not."""
    with torch.device("meta"):
        fresh = type(module)(*arguments)
    standard = {*vars(fresh), "_compiled_call_impl"}  # the latter, of module.compile(), would go on calling the old one
    return {name: value for name, value in vars(module).items() if name not in standard}


def check_dense(dense: nn.Module, expected: type[nn.Module]) -> None:
    """Raise unless ``dense`` is a layer of the expected type."""
    if not isinstance(dense, expected):
        raise ValueError(
            f"dense must be an nn.{expected.__name__}, got {type(dense).__name__}; fz.factorize finds the right class "
            "for every layer of a model"
        )


def dense_weight(dense: nn.Module) -> Tensor:
    """Return the weight of a dense layer."""
    weight = dense.weight
    assert isinstance(weight, Tensor)
    return weight
