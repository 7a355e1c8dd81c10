"""Finding the layers of a model that can be factorized, and saying why the others cannot."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from factorized.attention.family import is_transposed
from factorized.attention.heads import is_around_heads
from factorized.attention.multihead import is_shrunk_multihead
from factorized.attention.register import Found, adapter_of, find_attention
from factorized.attention.unit import AttentionUnit, FormKind
from factorized.formats.kernel import KernelShape
from factorized.nn.held_weight import HeldWeight, HoldsFactors, named_layers
from factorized.nn.layer import FactorizedLayer
from factorized.planning.replaceable import why_not_replaced, why_not_shrunk, why_tied

DENSE_TYPES: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
Pattern = str | type[nn.Module]
ALREADY = "already factorized; to choose its rank anew, fz.compose the model first"


@dataclass
class Candidate:
    """One module with a weight matrix: what it is, and why it is left alone if it is."""

    name: str
    module: nn.Module
    aliases: tuple[str, ...] = ()  # other names of the same module
    shape: KernelShape | None = None  # None for what can never be factorized
    reason: str | None = None
    tied_to: str | None = None  # the first layer that holds the same weight, when both are factorized together
    unit: AttentionUnit | None = None  # where it is attention that can be read
    kinds: tuple[FormKind, ...] = ()  # the forms of attention to shrink

    @property
    def names(self) -> tuple[str, ...]:
        """Every dotted name under which the model holds this module."""
        return (self.name, *self.aliases)


def find_candidates(
    model: nn.Module,
    kernel: Callable[[Sequence[int], int], KernelShape],
    include: Sequence[Pattern] | None,
    exclude: Sequence[Pattern],
    keep_first_and_last: bool,
    refuse: Callable[[nn.Module, KernelShape], str | None] = lambda module, shape: None,
    attention: Sequence[FormKind] = (),
) -> list[Candidate]:
    """Return every module of ``model`` with a weight matrix, in order; those to factorize have no ``reason``.

    An attention module is one of them, whatever layers it holds; ``attention`` names the forms to shrink. ``refuse``
    says why a scheme leaves a layer alone that others would not.
    """
    candidates = _walk(model, kernel, include)
    _check_patterns("include", include or (), model, candidates)
    _check_patterns("exclude", exclude, model, candidates)
    if keep_first_and_last:
        _keep_ends(candidates, include)
    for candidate in candidates:
        if candidate.reason is None and include is not None and not _matches(candidate, include):
            candidate.reason = "not in include="
        elif candidate.reason is None and _matches(candidate, exclude):
            candidate.reason = "in exclude="
        elif candidate.reason is None and candidate.shape is not None:
            candidate.reason = refuse(candidate.module, candidate.shape)
    _join_tied(model, candidates)
    _choose_forms(model, candidates, attention)
    return candidates


def _walk(
    model: nn.Module, kernel: Callable[[Sequence[int], int], KernelShape], include: Sequence[Pattern] | None
) -> list[Candidate]:
    names: dict[nn.Module, list[str]] = {}
    units: list[str] = []  # modules that are one thing, whose parts are not layers of their own
    parts: dict[nn.Module, str] = {}
    known = {found.module: found for found in find_attention(model)}
    strange = {found.name: found.module for found in known.values() if adapter_of(found.module) is None}
    for name, module in named_layers(model).items():
        if any(name.startswith(f"{unit}.") or unit == "" for unit in units):
            parts.setdefault(module, name)
            continue
        is_unit = _is_factorized(module) or (module in known and module not in strange.values())
        if is_unit:
            units.append(name)
        if is_unit or _has_weight_matrix(module):
            names.setdefault(module, []).append(name)
    candidates = [_inspect(module, found, kernel, known.get(module)) for module, found in names.items()]
    for candidate in candidates:
        if candidate.module in parts:
            candidate.reason = f"is also {parts[candidate.module]}, a part of another layer"
    for outer, module in strange.items():
        _spare_inside(candidates, outer, type(module).__name__, include)
    return candidates


def _spare_inside(candidates: list[Candidate], outer: str, attention: str, include: Sequence[Pattern] | None) -> None:
    """Leave alone the layers inside an attention module that nobody registered, unless ``include`` names them."""
    for candidate in candidates:
        inside = outer == "" or candidate.name.startswith(f"{outer}.")
        if inside and candidate.reason is None and not {*candidate.names}.intersection(map(str, include or ())):
            candidate.reason = (
                f"inside {attention}, attention that nobody registered: see fz.register_attention, or name the layer "
                "in include="
            )


def _choose_forms(model: nn.Module, candidates: list[Candidate], attention: Sequence[FormKind]) -> None:
    """Note which forms of every attention module are shrunk, or why none is."""
    tied = why_tied(model, [candidate.unit for candidate in candidates if candidate.unit is not None])
    for candidate in candidates:
        unit = candidate.unit
        if unit is None or candidate.reason is not None:
            continue
        candidate.kinds = tuple(kind for kind in attention if not (kind == "qk" and unit.rotary))
        if unit.shrunk is not None:
            candidate.reason = ALREADY
        elif not attention:
            candidate.reason = "attention is one unit; fz.LowRank() with attention=True shrinks its heads"
        elif not candidate.kinds:
            candidate.reason = "rotary embeddings turn its queries and keys, so that QK is no single form"
        else:
            candidate.reason = why_not_shrunk(unit) or tied.get(unit.module)


def _is_factorized(module: nn.Module) -> bool:
    if isinstance(module, (FactorizedLayer, HoldsFactors)):
        return True
    return is_around_heads(module) or is_shrunk_multihead(module)


def _has_weight_matrix(module: nn.Module) -> bool:
    if isinstance(module, DENSE_TYPES):
        return True
    weight = module._parameters.get("weight")
    return weight is not None and not is_lazy(weight) and weight.dim() >= 2


def _inspect(
    module: nn.Module,
    names: list[str],
    kernel: Callable[[Sequence[int], int], KernelShape],
    attention: Found | None,
) -> Candidate:
    if attention is not None:
        reason = None if attention.unit is not None else f"attention is one unit, and {attention.reason}"
        return Candidate(names[0], module, tuple(names[1:]), reason=reason, unit=attention.unit)
    candidate = Candidate(names[0], module, tuple(names[1:]), reason=_why_never(module))
    if candidate.reason is None:
        assert isinstance(module.weight, torch.Tensor)
        groups = module.groups if isinstance(module, (_ConvNd, HeldWeight)) else 1
        extents = module.matrix_shape if isinstance(module, HeldWeight) else tuple(module.weight.shape)
        candidate.shape = kernel(extents, groups)
    return candidate


def _why_never(module: nn.Module) -> str | None:
    """Return why this module can never be factorized, or None."""
    kind = type(module).__name__
    if _is_factorized(module):
        return ALREADY
    weight = module._parameters.get("weight")
    if weight is not None and is_lazy(weight):
        return "not initialized yet; run the model once"
    if type(module) not in DENSE_TYPES and not (is_transposed(module) or isinstance(module, HeldWeight)):
        return f"{kind} is not a plain Linear, Conv or Embedding"
    if weight is None:
        return "its weight is computed by another rule (weight norm, pruning)"
    if weight.numel() == 0:
        return "its weight has no entries"
    if isinstance(module, _ConvNd) and module.groups == module.in_channels > 1:
        return "depthwise convolution"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        return "max_norm renormalizes rows of the table, which a product has not"
    return why_not_replaced(module)


def _keep_ends(candidates: list[Candidate], include: Sequence[Pattern] | None) -> None:
    layers = [c for c in candidates if isinstance(c.module, DENSE_TYPES) or is_transposed(c.module)]
    named = {pattern for pattern in include or () if isinstance(pattern, str)}
    for candidate, place in [(layers[0], "first"), (layers[-1], "last")] if layers else []:
        if candidate.reason is None and not named.intersection(candidate.names):
            candidate.reason = f"{place} layer (keep_first_and_last=True)"


def _matches(candidate: Candidate, patterns: Sequence[Pattern]) -> bool:
    return any(_matches_one(candidate, pattern) for pattern in patterns)


def _matches_one(candidate: Candidate, pattern: Pattern) -> bool:
    if not isinstance(pattern, str):
        return isinstance(candidate.module, pattern)
    # A container's name stands for everything inside it.
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name in candidate.names)


def _check_patterns(argument: str, patterns: Sequence[Pattern], model: nn.Module, candidates: list[Candidate]) -> None:
    if isinstance(patterns, str) or not all(isinstance(p, (str, type)) for p in patterns):
        raise ValueError(f"{argument} must be a list of names, globs or module types, got {patterns!r}")
    for pattern in patterns:
        if any(_matches_one(candidate, pattern) for candidate in candidates):
            continue
        names = [name for candidate in candidates for name in candidate.names]
        near = difflib.get_close_matches(str(pattern), names, n=3, cutoff=0.4) or names[:3]
        shown = pattern if isinstance(pattern, str) else pattern.__name__
        found = f"its {len(names)} layers include {', '.join(map(repr, near))}" if names else "it has none"
        raise ValueError(f"{argument}={shown!r} matches no layer of {type(model).__name__}; {found}")


def _join_tied(model: nn.Module, candidates: list[Candidate]) -> None:
    """Let layers that share one weight be factorized together, or not at all."""
    by_name = {candidate.name: candidate for candidate in candidates}
    for owners in _shared_parameters(model):
        members = {owner: by_name[owner] for owner, key in owners if key == "weight" and owner in by_name}
        free = [member for member in members.values() if member.reason is None]
        if not free:
            continue
        blockers = [
            f"{owner}.{key}".removeprefix(".") for owner, key in owners if owner not in members or members[owner].reason
        ]
        if len({member.shape for member in free}) > 1:
            blockers = ["a layer that reads it in another shape"]
        for member in free:
            if blockers:
                member.reason = f"weight is tied to {blockers[0]}, which stays dense"
            elif member is not free[0]:
                member.tied_to = free[0].name


def _shared_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return (module name, parameter name) of every place that holds a parameter which another module holds too."""
    owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
    held = {name for name, module in named_layers(model).items() if isinstance(module, HeldWeight)}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                place = f"{name}.{key}".removeprefix(".")
                owners.setdefault(parameter, []).append((place, "weight") if place in held else (name, key))
    return [places for places in owners.values() if len(places) > 1]
