"""Finding the layers of a model that can be factorized, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from factorized.attention.family import is_transposed
from factorized.attention.heads import AroundHeads
from factorized.attention.multihead import ShrunkMultiheadAttention
from factorized.attention.register import Found, find_attention
from factorized.formats.kernel import KernelShape
from factorized.nn.dense import dense_weight, why_not_plain
from factorized.nn.held_factors import HoldsFactors
from factorized.nn.held_weight import HeldWeight, named_layers
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import dotted, is_inside, own_parameter, sharing_memory
from factorized.nn.running import ExampleInput
from factorized.nn.unregistered import parameters_in
from factorized.planning.candidate import AttentionCandidate, Candidate, LayerCandidate
from factorized.planning.pattern import Modules, Pattern, check_matches, check_patterns, matches, names_part
from factorized.planning.projections import ALREADY, Attention, attention_candidate, choose_forms, opens
from factorized.planning.replaceable import shares_memory, why_not_replaced

DENSE_TYPES: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
KernelOf = Callable[[Sequence[int], int], KernelShape]  # of a weight's shape and groups


def find_candidates(
    model: nn.Module,
    kernel: KernelOf,
    include: Sequence[Pattern] | None,
    exclude: Sequence[Pattern],
    keep_first_and_last: bool,
    refuse: Callable[[nn.Module, KernelShape], str | None] = lambda module, shape: None,
    attention: Attention = (),
    example_input: ExampleInput | None = None,
) -> list[Candidate]:
    """Return every module of ``model`` with a weight matrix, in order; those to factorize have no ``reason``.

    With ``attention="layers"`` the projections of attention are layers like any other; else each attention module is
    one candidate, and ``attention`` names the forms of it to shrink. ``refuse`` returns why the scheme leaves a layer
    dense. ``example_input`` is for checking how attention was registered.
    """
    given = {"include": include or (), "exclude": exclude}
    for argument, patterns in given.items():
        check_patterns(argument, patterns)
    modules = named_layers(model)
    whole = {read.module: read for read in find_attention(model) if not opens(read, attention, include, modules)}
    candidates, parts = _walk(modules, kernel, whole, attention)
    names = [name for candidate in candidates for name in candidate.names]
    for argument, patterns in given.items():
        check_matches(argument, patterns, model, modules, names, parts)
    if keep_first_and_last:
        _keep_ends(candidates, include)
    shared = sharing_memory(model)
    for candidate in candidates:
        if candidate.reason is not None:
            continue
        is_whole = isinstance(candidate, AttentionCandidate)
        if include is not None and not matches(include, candidate.names, modules):
            candidate.reason = "not in include="
        elif matches(exclude, candidate.names, modules) or (is_whole and names_part(exclude, candidate.names, modules)):
            candidate.reason = "in exclude="
        elif isinstance(candidate, LayerCandidate):
            candidate.reason = refuse(candidate.module, candidate.shape)
            if candidate.reason is None and (other := shared.get(dense_weight(candidate.module))) is not None:
                candidate.reason = shares_memory(other)
    _join_tied(model, candidates)
    if attention != "layers":
        whole_modules = [candidate for candidate in candidates if isinstance(candidate, AttentionCandidate)]
        choose_forms(model, whole_modules, attention, example_input)
    return candidates


def _walk(
    modules: Modules,
    kernel: KernelOf,
    whole: Mapping[nn.Module, Found],
    attention: Attention,
) -> tuple[list[Candidate], list[str]]:
    """Return the candidates, and the names of everything inside those taken as a whole: attention, or factorized."""
    names: dict[nn.Module, list[str]] = {}
    units: list[str] = []
    parts: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if any(is_inside(name, unit) for unit in units):
            parts[name] = module
            continue
        is_unit = _is_factorized(module) or module in whole
        if is_unit:
            units.append(name)
        if is_unit or _has_weight_matrix(module):
            names.setdefault(module, []).append(name)
    candidates = [
        attention_candidate(whole[module], places, attention) if module in whole else _layer(module, places, kernel)
        for module, places in names.items()
    ]
    inner = {module: name for name, module in reversed(parts.items())}  # under the first of its names
    for candidate in candidates:
        if candidate.module in inner:
            candidate.reason = f"is also {inner[candidate.module]}, a part of another layer"
    return candidates, list(parts)


def _is_factorized(module: nn.Module) -> bool:
    return isinstance(module, (FactorizedLayer, HoldsFactors, AroundHeads, ShrunkMultiheadAttention))


def _has_weight_matrix(module: nn.Module) -> bool:
    if isinstance(module, DENSE_TYPES):
        return True
    weight = own_parameter(module, "weight")
    return weight is not None and not is_lazy(weight) and weight.dim() >= 2


def _layer(module: nn.Module, names: Sequence[str], kernel: KernelOf) -> Candidate | LayerCandidate:
    """Return a layer as a candidate; with its reason where it can never be factorized."""
    name, aliases, reason = names[0], tuple(names[1:]), _why_never(module)
    weight = own_parameter(module, "weight")
    if reason is not None or weight is None:
        return Candidate(name=name, module=module, aliases=aliases, reason=reason)
    groups = module.groups if isinstance(module, (_ConvNd, HeldWeight)) else 1
    shape = kernel(module.matrix_shape if isinstance(module, HeldWeight) else tuple(weight.shape), groups)
    return LayerCandidate(name=name, module=module, aliases=aliases, shape=shape)


def _why_never(module: nn.Module) -> str | None:
    """Return why this module can never be factorized, or None."""
    if _is_factorized(module):
        return ALREADY
    if isinstance(module, ScriptModule):
        return (
            "compiled by torch.jit, which keeps its weights; factorize it before, and then trace it, or script what "
            "fz.lower returns"
        )
    weight = own_parameter(module, "weight")
    if weight is not None and is_lazy(weight):
        return "not initialized yet; run the model once"
    if weight is None:
        return "its weight is computed (by weight norm, another parametrization or pruning); make it a parameter first"
    known = is_transposed(module) or isinstance(module, HeldWeight)
    if not known and (reason := why_not_plain(module, DENSE_TYPES)) is not None:
        return reason
    if weight.numel() == 0:
        return "its weight has no entries"
    if isinstance(module, _ConvNd) and module.groups == module.in_channels > 1:
        return "depthwise convolution"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        return "max_norm renormalizes rows of the table, which factors do not store"
    return why_not_replaced(module)


def _keep_ends(candidates: list[Candidate], include: Sequence[Pattern] | None) -> None:
    layers = [c for c in candidates if isinstance(c.module, DENSE_TYPES) or is_transposed(c.module)]
    named = {pattern for pattern in include or () if isinstance(pattern, str)}
    for candidate, place in [(layers[0], "first"), (layers[-1], "last")] if layers else []:
        if candidate.reason is None and not named.intersection(candidate.names):
            candidate.reason = f"{place} layer (keep_first_and_last=True)"


def _join_tied(model: nn.Module, candidates: list[Candidate]) -> None:
    """Make layers that share one weight be factorized together or stay dense together."""
    by_name = {candidate.name: candidate for candidate in candidates}
    for owners in _shared_parameters(model):
        members = {owner: by_name[owner] for owner, key in owners if key == "weight" and owner in by_name}
        free = [m for m in members.values() if isinstance(m, LayerCandidate) and m.reason is None]
        if not free:
            continue
        blockers = [dotted(owner, key) for owner, key in owners if owner not in members or members[owner].reason]
        if len({member.shape for member in free}) > 1:
            blockers = ["a layer that reads it in another shape"]
        for member in free:
            if blockers:
                member.reason = f"weight is tied to {blockers[0]}, which stays dense"
            elif member is not free[0]:
                member.tied_to = free[0].name


def _shared_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return (module name, attribute) of every place that holds a parameter shared with another module.

    Plain attributes, lists, tuples, dicts, partials and functions count too: code that reads a weight there would keep
    the old one.
    """
    owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
    held = {name for name, module in named_layers(model).items() if isinstance(module, HeldWeight)}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                place = dotted(name, key)
                owners.setdefault(parameter, []).append((place, "weight") if place in held else (name, key))
        if isinstance(module, DistributedDataParallel):  # lists all parameters; fz.factorize says what to do instead
            continue
        own = set(module._parameters.values())  # a recurrent network also lists its own weights
        for key, value in vars(module).items():
            for parameter in dict.fromkeys(parameters_in(value)):
                if parameter not in own:
                    owners.setdefault(parameter, []).append((name, key))
    return [places for places in owners.values() if len(places) > 1]
