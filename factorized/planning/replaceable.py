"""Whether a layer or an attention module can be replaced, and what would be lost otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from factorized.attention.unit import AttentionUnit
from factorized.nn.model import dotted, module_names, parameter_names, sharing_memory

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # around a call
# Around reading and writing state dicts; torch itself adds some to attention and lazy layers, never to plain ones.
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # types that can be decomposed and multiplied
PLAIN_TENSORS = (Tensor, nn.Parameter)
KNOWN_TENSORS = (*PLAIN_TENSORS, DTensor, FakeTensor)
# Attributes by which Megatron, DeepSpeed and muP describe the tensor itself: its shards, its shape.
OF_THE_TENSOR = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "infshape", "ds_")
PLAIN_LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear)  # the second is torch's own, in nn.MultiheadAttention


def why_not_replaced(module: nn.Module) -> str | None:
    """Return what a factorized layer in the place of a plain one would lose, or None."""
    if isinstance(module._parameters.get("weight"), DTensor):
        return "its weight is sharded over processes and cannot be decomposed; factorize the model before fully_shard"
    if any(getattr(module, hooks) for hooks in (*HOOKS, *STATE_HOOKS)):
        return "has hooks that a replacement would lose"
    if "forward" in module.__dict__:
        return "its forward was replaced, which a replacement would lose"
    extra = [*module._parameters.keys() - {"weight", "bias"}, *module._buffers, *module._modules]
    if extra:
        return f"holds {min(extra)!r} besides its weight and bias, which a replacement would lose"
    weight = module._parameters["weight"]
    return why_weight_stays(weight) if weight is not None else None


def why_not_decomposed(weight: Tensor) -> str | None:
    """Return why a weight of this class and type cannot be decomposed, or None."""
    if type(weight) not in KNOWN_TENSORS:
        return f"its weight is a {type(weight).__name__}, not a plain parameter"
    if weight.dtype not in FLOATS:
        kind = str(weight.dtype).removeprefix("torch.")
        plain = "not floating point" if not weight.is_floating_point() else "which cannot be decomposed; cast it first"
        return f"its weight is {kind}, {plain}"
    return None


def why_weight_stays(weight: Tensor) -> str | None:
    """Return why other tensors cannot take the place of a weight, or None.

    Plain values as attributes (``weight.no_weight_decay = True``) describe how to train it; new tensors get them too.
    """
    if (reason := why_not_decomposed(weight)) is not None:
        return reason
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return (
            "its weight has a gradient hook, which means nothing for factors; remove the hook, and register one on the "
            "factors afterwards"
        )
    for name, value in vars(weight).items() if type(weight) in PLAIN_TENSORS else ():
        if name.startswith(OF_THE_TENSOR) or not _is_plain(value):
            return (
                f"its weight has the attribute {name!r}, which describes a tensor that would no longer exist; delete "
                "the attribute, or set it after factorizing"
            )
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def why_not_shrunk(unit: AttentionUnit) -> str | None:
    """Return why the heads of ``unit`` cannot be shrunk, judging by the module alone, or None."""
    module = unit.module
    if isinstance(module, nn.MultiheadAttention) and type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} is not MultiheadAttention itself, and a replacement would lose its forward"
    projections = {p.path: module.get_submodule(p.path) for p in unit.projections}
    for place in _places_on_the_way(projections):
        if "forward" in module.get_submodule(place).__dict__:
            return f"{f'the forward of {place}' if place else 'its forward'} was replaced, and a copy would not keep it"
    if any(getattr(layer, hooks) for layer in projections.values() for hooks in HOOKS):
        return "its projections have hooks that replacements would lose"
    for parameter in unit.parameters:
        if (lost := why_weight_stays(parameter)) is not None:
            return f"of its projections, {lost}"
    for place, layer in projections.items():
        if isinstance(layer, nn.Linear) and type(layer) not in PLAIN_LINEARS:
            return f"{place} is {type(layer).__name__}, and a plain Linear in its place would lose what it adds"
    return None


def _places_on_the_way(paths: Iterable[str]) -> list[str]:
    """Return the dotted names of all modules that are copied or replaced: a unit, its projections, and any between."""
    places = {""}
    for path in paths:
        parts = path.split(".")
        places |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return sorted(places)


def shares_memory(other: str) -> str:
    """Return why a weight stays whose values are also those of another parameter."""
    return f"its weight shares memory with {other}, a tie that would be lost; make them one parameter, or copy one"


def why_tied(model: nn.Module, units: Iterable[AttentionUnit]) -> dict[nn.Module, str]:
    """Return, by module, why it cannot get new matrices: one of its parameters is used elsewhere in ``model``.

    A unit that is itself in several places is changed in all of them.
    """
    places, names, shared = module_names(model), parameter_names(model), sharing_memory(model)
    reasons = {}
    for unit in units:
        inside = parameter_names(unit.module)
        for parameter in unit.parameters:
            own = {dotted(place, inside[parameter][0]) for place in places[unit.module]}
            if set(names[parameter]) != own:
                reasons[unit.module] = f"its weights are tied: {' and '.join(names[parameter])} are one parameter"
                break
            if parameter in shared:
                reasons[unit.module] = f"of its projections, {shares_memory(shared[parameter])}"
                break
    return reasons
