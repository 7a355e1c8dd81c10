"""Whether new matrices can go into an attention module, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from factorized.adapters.unit import AttentionUnit
from factorized.planning.names import module_names, parameter_names

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # lost with a module
PLAIN_LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear)  # the second is torch's own, in nn.MultiheadAttention


def why_not_shrunken(unit: AttentionUnit) -> str | None:
    """Return why the heads of ``unit`` cannot be shrunken, by the module alone, or None."""
    module = unit.module
    if isinstance(module, nn.MultiheadAttention) and type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} is not MultiheadAttention itself, and a replacement would lose its forward"
    projections = {p.path: module.get_submodule(p.path) for p in unit.projections}
    for place in _places_on_the_way(projections):
        if "forward" in module.get_submodule(place).__dict__:
            return f"{f'the forward of {place}' if place else 'its forward'} was replaced, and a copy would not keep it"
    if any(getattr(layer, hooks) for layer in projections.values() for hooks in HOOKS):
        return "its projections have hooks that replacements would lose"
    for place, layer in projections.items():
        if isinstance(layer, nn.Linear) and type(layer) not in PLAIN_LINEARS:
            return f"{place} is {type(layer).__name__}, and a plain Linear in its place would lose what it adds"
    return None


def _places_on_the_way(paths: Iterable[str]) -> list[str]:
    """Return the dotted names of all modules that are copied or replaced: a unit, its projections, those between."""
    places = {""}
    for path in paths:
        parts = path.split(".")
        places |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return sorted(places)


def why_tied(model: nn.Module, units: Iterable[AttentionUnit]) -> dict[nn.Module, str]:
    """Return, by module, why new matrices cannot go into it: a projection is also something else in ``model``.

    That may be its layer, its weight or its bias. A unit that is itself at several places is changed at all of them.
    """
    places, names = module_names(model), parameter_names(model)
    reasons = {}
    for unit in units:
        inside = parameter_names(unit.module)
        for parameter in (
            p for projection in unit.projections for p in (projection.weight, projection.bias) if p is not None
        ):
            own = {f"{place}.{inside[parameter][0]}".removeprefix(".") for place in places[unit.module]}
            if set(names[parameter]) != own:
                reasons[unit.module] = f"its weights are tied: {' and '.join(names[parameter])} are one"
                break
    return reasons
