"""The argument ``attention=``: factorize projections as ordinary layers, shrink heads, or neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import nn

from factorized.attention.register import Found, adapter_of
from factorized.attention.unit import FORMS, AttentionUnit, FormName, are_forms, shrunk_note
from factorized.attention.verify import UNCHECKED, check_registrations
from factorized.formats.scheme import Scheme
from factorized.nn.model import module_names
from factorized.nn.running import ExampleInput
from factorized.planning.candidate import AttentionCandidate, Candidate
from factorized.planning.pattern import Modules, Pattern, matches, names_part
from factorized.planning.replaceable import why_not_shrunk, why_tied

AttentionOption = Literal["layers", "heads", False] | Sequence[FormName]  # as the user writes it; None: "layers"
Attention = Literal["layers"] | tuple[FormName, ...]  # after reading: the forms to shrink, none for False

ALREADY = "already factorized; fz.truncate lowers its rank; to choose another one, call fz.compose on the model first"


def read_option(attention: AttentionOption | None, scheme: Scheme) -> Attention:
    """Return the checked value of ``attention=``."""
    if attention is None or attention == "layers":
        return "layers"
    if attention is False:
        return ()
    if attention != "heads" and (not are_forms(attention) or not attention):
        raise ValueError(f'attention must be "layers", "heads", False or a list of "qk" and "ov", got {attention!r}')
    if not scheme.by_spectrum:
        raise ValueError(f"attention={attention!r} gives heads fewer dimensions, which is for LowRank, got {scheme}")
    return tuple(form for form in FORMS if attention == "heads" or form in attention)


def opens(
    read: Found,
    attention: Attention,
    include: Sequence[Pattern] | None,
    modules: Modules,
) -> bool:
    """Return whether the layers inside an attention module are candidates, rather than the module as a whole.

    ``include`` opens it by naming a projection (by name or glob), unless it also names the whole module.
    """
    if isinstance(read.module, nn.MultiheadAttention) or shrunk_note(read.module) is not None:
        return False  # projections that are parameters of the module, or no longer dense layers
    if attention == "layers":
        return True
    names = [name for name, module in modules.items() if module is read.module]
    return include is not None and not matches(include, names, modules) and names_part(include, names, modules)


def attention_candidate(read: Found, names: Sequence[str], attention: Attention) -> Candidate | AttentionCandidate:
    """Return an attention module as one candidate."""
    name, aliases, reason = names[0], tuple(names[1:]), None
    if shrunk_note(read.module) is not None:
        reason = ALREADY
    elif attention == "layers":
        reason = 'its projections are parameters, not layers; fz.LowRank() with attention="heads" shrinks its heads'
    elif not attention:
        reason = "attention=False leaves attention as it is"
    elif adapter_of(read.module) is None:
        reason = 'this class of attention is not registered: see fz.register_attention, or use attention="layers"'
    elif read.unit is None:
        reason = f"its heads cannot be shrunk: {read.reason}"
    if read.unit is None:
        return Candidate(name=name, module=read.module, aliases=aliases, reason=reason)
    return AttentionCandidate(name=name, module=read.module, aliases=aliases, reason=reason, unit=read.unit)


def choose_forms(
    model: nn.Module,
    candidates: Sequence[AttentionCandidate],
    forms: tuple[FormName, ...],
    example_input: ExampleInput | None = None,
) -> None:
    """Set which forms of every attention module are shrunk, or why none is; raise for a wrong registration."""
    tied = why_tied(model, [candidate.unit for candidate in candidates])
    for candidate in candidates:
        unit = candidate.unit
        if candidate.reason is not None:
            continue
        candidate.forms = tuple(form for form in forms if not (form == "qk" and unit.rotary))
        if not candidate.forms:
            candidate.reason = "rotary embeddings rotate its queries and keys, so that QK is not a single form"
        else:
            candidate.reason = why_not_shrunk(unit) or tied.get(unit.module)
    chosen = [candidate for candidate in candidates if candidate.reason is None]
    unchecked = check_registrations({c.name: c.unit for c in chosen}, model, example_input)
    for candidate in chosen:
        candidate.note = UNCHECKED if type(candidate.module) in unchecked else None


def attention_candidates(
    model: nn.Module,
    units: Iterable[AttentionUnit],
    forms: tuple[FormName, ...],
    example_input: ExampleInput | None = None,
) -> list[AttentionCandidate]:
    """Return attention modules of ``model``, each with the forms to shrink or the reason why none is."""
    places = module_names(model)
    candidates = [
        AttentionCandidate(
            name=places[unit.module][0],
            module=unit.module,
            aliases=tuple(places[unit.module][1:]),
            reason=None if unit.shrunk is None else ALREADY,
            unit=unit,
        )
        for unit in units
    ]
    choose_forms(model, candidates, forms, example_input)
    return candidates
