"""Reading an attention module whose projections are named layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import nn

from factorized.attention.heads import AroundHeads
from factorized.attention.unit import AttentionUnit, Projection, shrunk_note
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import own_parameter


class UnreadableAttention(ValueError):
    """An attention module whose matrices are not where its adapter looks for them; the message is the reason."""


@dataclass(frozen=True)
class Family:
    """Where a class of attention modules keeps its projections: dotted names inside the module.

    One layer named as ``query``, ``key`` and ``value``, or as the last two, packs them in this order.
    """

    query: str
    key: str
    value: str
    output: str
    heads: str  # the attribute with the number of query heads
    kv_heads: str | None = None  # the same for keys and values, where they are fewer
    head_size: str | None = None  # the head size that ``forward`` reads, if it may be changed
    scale: str | None = None  # the softmax scale that ``forward`` reads, if it is not computed from the head size
    all_heads: str | None = None  # an attribute that must always equal heads times head size
    width: str | None = None  # an attribute that equals heads times head size unless heads were pruned
    rotary: bool = False
    one_size: bool = True  # whether ``forward`` has one head size for queries, keys and values

    def __call__(self, module: nn.Module) -> AttentionUnit:
        """Read one module."""
        heads = _whole_number(module, self.heads)
        kv_heads = _whole_number(module, self.kv_heads) if self.kv_heads else heads
        note = shrunk_note(module)
        size = note.head_size if note else self._head_size(module, heads)
        qk, ov = (note.qk, note.ov) if note else (size, size)
        queries, keys = heads * qk, kv_heads * qk
        before_key = queries if self.key == self.query else 0
        before_value = (queries if self.value == self.query else 0) + (keys if self.value == self.key else 0)
        self._check_whole(module, heads, size)
        for path in filter(None, (self.scale, self.all_heads)):
            attribute(module, path)  # a scale that ``forward`` finds elsewhere would follow the head size
        unit = AttentionUnit(
            module=module,
            query=_projection(module, self.query, heads, qk, 0),
            key=_projection(module, self.key, kv_heads, qk, before_key),
            value=_projection(module, self.value, kv_heads, ov, before_value),
            output=_projection(module, self.output, heads, ov, 0, is_output=True),
            rotary=self.rotary,
            one_size=self.one_size,
            head_size=size,
            resizable=tuple(filter(None, (self.head_size, self.all_heads))) if self.head_size and self.scale else (),
        )
        _check_sizes(unit)
        return unit

    def _head_size(self, module: nn.Module, heads: int) -> int:
        if self.head_size is not None:
            return _whole_number(module, self.head_size)
        return _weight(module, self.output).shape[_dim(module, self.output, 1)] // heads

    def _check_whole(self, module: nn.Module, heads: int, size: int) -> None:
        if pruned := getattr(module, "pruned_heads", None):
            raise UnreadableAttention(f"heads {sorted(pruned)} were pruned")
        if self.width is not None and heads * size != attribute(module, self.width):
            raise UnreadableAttention(
                f"{heads} heads of {size} do not make up its {self.width}, {attribute(module, self.width)}: heads were "
                "pruned or lowered"
            )


def attribute(module: nn.Module, path: str) -> Any:
    """Return the attribute at a dotted path; raise where there is none."""
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        raise UnreadableAttention(
            f"it has no {path}: {type(module).__name__} is not built as its adapter expects"
        ) from error


def is_transposed(layer: nn.Module) -> bool:
    """Return whether ``layer`` is the Conv1D of transformers: a linear layer whose weight is (in, out)."""
    return (type(layer).__module__, type(layer).__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def plain_weight(layer: nn.Module, path: str) -> nn.Parameter:
    """Return the weight parameter of a projection; raise where its layer is not a plain one."""
    if isinstance(layer, FactorizedLayer):
        raise UnreadableAttention(f"{path} is already factorized as a layer")
    weight = own_parameter(layer, "weight")
    known = isinstance(layer, (nn.Linear, AroundHeads)) or is_transposed(layer)
    if weight is None or not known:
        raise UnreadableAttention(f"{path} is {type(layer).__name__}, whose weight is not a plain parameter")
    if isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
        raise UnreadableAttention(f"{path} is {type(layer).__name__}, whose forward is not that of Linear")
    if not weight.is_floating_point():
        raise UnreadableAttention(f"the weight of {path} is {str(weight.dtype).removeprefix('torch.')}")
    return weight


def plain_bias(layer: nn.Module, path: str) -> nn.Parameter | None:
    """Return the bias parameter that ``path`` ends with, or None where there is no bias; raise if it is computed."""
    name = path.rpartition(".")[2]
    bias = own_parameter(layer, name)
    if bias is None and getattr(layer, name) is not None:
        raise UnreadableAttention(f"{path} is computed by another rule (pruning, a parametrization)")
    return bias


def _weight(module: nn.Module, path: str) -> nn.Parameter:
    return plain_weight(attribute(module, path), path)


def _dim(module: nn.Module, path: str, dim: int) -> int:
    return 1 - dim if is_transposed(attribute(module, path)) else dim


def _projection(module: nn.Module, path: str, heads: int, size: int, start: int, is_output: bool = False) -> Projection:
    weight = _weight(module, path)
    bias = plain_bias(attribute(module, path), f"{path}.bias")
    return Projection(path, weight, bias, heads, size, _dim(module, path, int(is_output)), start)


def _whole_number(module: nn.Module, path: str) -> int:
    value = attribute(module, path)
    if not isinstance(value, int) or value < 1:
        raise UnreadableAttention(f"{path} is {value!r}, not a number of heads or dimensions")
    return value


def _check_sizes(unit: AttentionUnit) -> None:
    """Raise unless the weights fit the number and size of heads that the module reports."""
    used: dict[str, int] = {}
    for projection in unit.projections:
        used[projection.path] = used.get(projection.path, 0) + projection.size
    for projection in unit.projections:
        extent = projection.weight.shape[projection.dim]
        if used[projection.path] != extent:
            raise UnreadableAttention(
                f"{projection.path} has {extent} {'columns' if projection is unit.output else 'rows'} where "
                f"{projection.heads} heads of {projection.head_size} need {used[projection.path]}: heads were pruned, "
                "or its adapter does not fit"
            )
    if unit.query.heads % unit.key.heads:
        raise UnreadableAttention(f"{unit.query.heads} query heads cannot share {unit.key.heads} key heads evenly")
