"""Attention modules with other head sizes: new modules, which leave the old one unchanged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from factorized.attention.heads import HeadsIn, HeadsOut, plain_type_of
from factorized.attention.matrices import Matrices, write_matrices
from factorized.attention.multihead import ShrunkMultiheadAttention, dense_multihead
from factorized.attention.register import read_attention
from factorized.attention.unit import AttentionUnit, Projection, Shrunk
from factorized.nn.dense import added_attributes

# Arguments for the smallest module of each class that takes more than two sizes.
SMALLEST: dict[type[nn.Module], tuple[object, ...]] = {
    HeadsIn: (1, ((1, 1),), 1),
    HeadsOut: (1, 1, 1, 1),
    ShrunkMultiheadAttention: (1, 1, 1, 1),
}


def shrunk_module(unit: AttentionUnit, qk: int, ov: int, matrices: Matrices | None) -> nn.Module:
    """Return a module like the unit's with heads of these sizes, holding ``matrices`` (None leaves them unfilled).

    ``nn.MultiheadAttention`` becomes a ``ShrunkMultiheadAttention``. Every other class stays the same: where its
    ``forward`` has one head size for all, the smaller of the two ranks is padded between the projections.
    """
    if isinstance(unit.module, nn.MultiheadAttention):
        new = materialized(ShrunkMultiheadAttention.like(unit.module, qk, ov), unit.output.weight)
    else:
        size = max(qk, ov) if unit.resizable else unit.head_size
        added_bias = ov < unit.head_size and unit.value.bias is not None and not unit.has_output_bias
        new = _resized(unit, qk, ov, size, Shrunk(unit.head_size, qk, ov, added_bias))
    return _filled(new, unit, matrices)


def plain_module(unit: AttentionUnit, size: int, matrices: Matrices | None) -> nn.Module:
    """Return the plain module of a shrunk unit: one head ``size`` for all, which some classes fix to the dense one."""
    dense = dense_multihead(unit.module)
    if dense is not None:
        return _filled(materialized(dense, unit.output.weight), unit, matrices)
    keeps_added_bias = unit.shrunk is not None and unit.shrunk.added_bias and size == unit.value.head_size
    note = Shrunk(unit.head_size, size, size, keeps_added_bias)
    new = _filled(_resized(unit, size, size, size, note), unit, matrices)
    del new.shrunk
    return new


def lowered_module(unit: AttentionUnit) -> nn.Module | None:
    """Return the module of a shrunk unit with plain layers around its heads, whose sizes stay; None if impossible.

    Padding heads with zeros is done by plain layers too.
    """
    if isinstance(unit.module, ShrunkMultiheadAttention):
        return None
    changes: dict[str, object] = {}
    for path in dict.fromkeys(projection.path for projection in unit.projections):
        layer = unit.module.get_submodule(path)
        if isinstance(layer, (HeadsIn, HeadsOut)):
            plain = layer.lowered()
            if plain is None:
                return None
            _copy_added(layer, plain)
            changes[path] = plain.train(layer.training)
    new = grafted(unit.module, changes)
    del new.shrunk
    return new


def plain_size(unit: AttentionUnit) -> int:
    """Return the smallest head size at which the unit's class can hold its present matrices."""
    return max(unit.query.head_size, unit.value.head_size) if unit.resizable else unit.head_size


def _filled(new: nn.Module, old: AttentionUnit, matrices: Matrices | None) -> nn.Module:
    trains: dict[nn.Parameter, bool] = {}  # a packed parameter trains if any of its parts did
    for part, was in zip(read_unit(new).projections, old.projections, strict=True):
        trains[part.weight] = trains.get(part.weight, False) or was.weight.requires_grad
        if part.bias is not None:
            like = was.weight if was.bias is None else was.bias
            trains[part.bias] = trains.get(part.bias, False) or like.requires_grad
        layer, replaced = new.get_submodule(part.path), old.module.get_submodule(was.path)
        layer.train(replaced.training)
        if layer is not new and replaced is not old.module:
            _copy_added(replaced, layer)
        vars(part.weight).update(vars(was.weight))
        if part.bias is not None and was.bias is not None:
            vars(part.bias).update(vars(was.bias))
    if type(new) is not type(old.module):  # nn.MultiheadAttention; copies of other classes have them
        _copy_added(old.module, new)
    new.training = old.module.training
    for parameter, does in trains.items():
        parameter.requires_grad_(does)
    if matrices is not None and not old.query.weight.is_meta:
        write_matrices(read_unit(new), matrices)
    return new


def _copy_added(old: nn.Module, new: nn.Module) -> None:
    with torch.device("meta"):
        fresh = type(old)(*SMALLEST.get(type(old), (1, 1)))
    for name, value in added_attributes(old, fresh).items():
        if not hasattr(new, name):
            setattr(new, name, value)


def read_unit(module: nn.Module) -> AttentionUnit:
    """Read an attention module; raise if that is not possible."""
    found = read_attention("", module)
    if found is None or found.unit is None:
        raise ValueError(f"{type(module).__name__} cannot be read as attention: {found and found.reason}")
    return found.unit


def _resized(unit: AttentionUnit, qk: int, ov: int, size: int, note: Shrunk) -> nn.Module:
    """Return a copy of the unit's module with new projections; everything else is shared, not copied."""
    layers: dict[str, nn.Module] = {}
    for path in dict.fromkeys(projection.path for projection in (unit.query, unit.key, unit.value)):
        held = [p for p in (unit.query, unit.key, unit.value) if p.path == path]
        ranks = [(p.heads, ov if p is unit.value else qk) for p in held]
        layers[path] = _input_layer(unit.module.get_submodule(path), held[0], tuple(ranks), size)
    layers[unit.output.path] = _output_layer(unit, ov, size, unit.has_output_bias or note.added_bias)
    values: dict[str, object] = dict(zip(unit.resizable, (size, unit.query.heads * size), strict=False))
    return grafted(unit.module, {**layers, **values, "shrunk": note})


def _input_layer(old: nn.Module, projection: Projection, parts: tuple[tuple[int, int], ...], size: int) -> nn.Module:
    plain = plain_type_of(old)
    if all(rank == size for _, rank in parts):
        return _plain_layer(plain, projection.long, sum(heads * size for heads, _ in parts), projection)
    has_bias = projection.bias is not None
    layer = HeadsIn(projection.long, parts, size, has_bias, plain_type=plain, device="meta")
    return materialized(layer, projection.weight)


def _output_layer(unit: AttentionUnit, ov: int, size: int, has_bias: bool) -> nn.Module:
    output = unit.output
    plain = plain_type_of(unit.module.get_submodule(output.path))
    if ov == size:
        return _plain_layer(plain, output.heads * size, output.long, output, has_bias)
    layer = HeadsOut(output.heads, ov, size, output.long, has_bias, plain_type=plain, device="meta")
    return materialized(layer, output.weight)


def _plain_layer(
    plain: type[nn.Module], inputs: int, outputs: int, like: Projection, has_bias: bool | None = None
) -> nn.Module:
    has_bias = like.bias is not None if has_bias is None else has_bias
    with torch.device("meta"):
        is_linear = issubclass(plain, nn.Linear)
        layer = plain(inputs, outputs, bias=has_bias) if is_linear else plain(outputs, inputs)
    return materialized(layer, like.weight)


def materialized(layer: nn.Module, like: torch.Tensor) -> nn.Module:
    """Allocate the parameters of a layer on the meta device, with the device and type of ``like``."""
    return layer.to(like.dtype).to_empty(device=like.device)


def grafted(module: nn.Module, changes: Mapping[str, object]) -> nn.Module:
    """Return a copy of ``module`` with the attributes at dotted paths changed; everything else is shared with it."""
    new = type(module).__new__(type(module))
    # The copy has its own containers, so that nothing put into it reaches the original. Those of hooks are shared,
    # because the handles that were given out refer to them.
    own = {k for k, v in module.__dict__.items() if isinstance(v, (dict, set)) and "_hooks" not in k}
    new.__dict__ = {k: v.copy() if k in own else v for k, v in module.__dict__.items()}
    new.__dict__.pop("_compiled_call_impl", None)  # of module.compile(): it would keep calling the original
    inner: dict[str, dict[str, object]] = {}
    for path, value in changes.items():
        first, _, rest = path.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = value
        else:
            setattr(new, first, value)
    for child, deeper in inner.items():
        setattr(new, child, grafted(getattr(module, child), deeper))
    return new
