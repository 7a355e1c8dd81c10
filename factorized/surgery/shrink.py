"""``fz.factorize_attention`` and ``fz.spectral_init_attention``: the heads of whole models as products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite

from torch import nn
from torch.distributed.tensor import DTensor

from factorized.attention.matrices import check_finite, spectral_matrices, write_matrices
from factorized.attention.register import Found, find_attention
from factorized.attention.unit import KINDS, AttentionUnit, FormKind, are_kinds
from factorized.formats.product import LowRank
from factorized.nn.init import Init, check_init
from factorized.nn.model import check_model
from factorized.planning.assemble import attention_plan
from factorized.planning.plan import Plan
from factorized.planning.replaceable import why_not_decomposed, why_tied
from factorized.planning.select import find_candidates
from factorized.surgery.factorize import build_layers, install
from factorized.surgery.replace import refuse_wrapped


def factorize_attention(
    model: nn.Module,
    rank_scale: float | Mapping[FormKind, float] = 0.5,
    init: Init = "spectral",
    forms: Sequence[FormKind] = KINDS,
) -> nn.Module:
    """Give every head of every attention module of ``model`` fewer dimensions, in place, and return the model.

    ``"spectral"`` keeps the best approximation of each head's forms by truncated SVD; other inits draw new matrices.
    Biases are kept right and the softmax scale stays. All modules are changed, or none. A model that is itself one
    attention module cannot be changed in place: use what is returned.

    Args:
        model: any model with attention that ``fz.register_attention`` or the library knows.
        rank_scale: the share of a head's dimensions that stays, in (0, 1]; or one for each form.
        init: as for ``fz.factorize``.
        forms: which forms are shrunk; under rotary embeddings only ``"ov"`` can be.
    """
    check_init(init)
    kinds = _checked_forms(forms)
    scales = _checked_scales(rank_scale, kinds)
    units = _units(model, kinds)
    for name, unit in units.items():
        for kind in kinds:
            if round(scales[kind] * unit.head_size) < 1:
                raise ValueError(
                    f"rank_scale={scales[kind]:g} leaves a head of {name or 'the model'!r} without dimensions: it has "
                    f"{unit.head_size}, so ask for {ceil(1e4 / unit.head_size) / 1e4:g} or more, up to 1. Nothing was "
                    "changed"
                )
    plan = _plan(model, units, kinds, scales)
    return install(model, plan, build_layers(model, plan, init))


def spectral_init_attention(model: nn.Module, forms: Sequence[FormKind] = KINDS) -> nn.Module:
    """Rebalance the factors of every head in place, so that both carry √Σ of their product; return the model.

    The model computes what it did: only the split of each form into its two factors is chosen (section 3.1). Value
    biases end up in the output bias.
    """
    kinds = _checked_forms(forms)
    units = _units(model, kinds)
    tied = why_tied(model, units.values())
    for name, unit in units.items():
        if unit.module in tied:
            raise ValueError(f"{name or 'the model'}: {tied[unit.module]}. Nothing was changed")
    new = {
        name: spectral_matrices(unit, unit.query.head_size, unit.value.head_size, kinds, may_add_bias=False)
        for name, unit in units.items()
    }
    for name, matrices in new.items():
        write_matrices(units[name], matrices)
    return model


def _checked_forms(forms: Sequence[FormKind]) -> tuple[FormKind, ...]:
    if not are_kinds(forms) or not forms:
        raise ValueError(f'forms must be a list of "qk" and "ov", or one of them, got {forms!r}')
    return tuple(kind for kind in KINDS if kind in forms)


def _checked_scales(rank_scale: float | Mapping[FormKind, float], kinds: Sequence[FormKind]) -> dict[FormKind, float]:
    if isinstance(rank_scale, Mapping):
        if set(rank_scale) != set(kinds):
            raise ValueError(f"rank_scale must name each of forms={tuple(kinds)} and nothing else, got {rank_scale!r}")
        scales = {kind: rank_scale[kind] for kind in kinds}
    else:
        scales = dict.fromkeys(kinds, rank_scale)
    for scale in scales.values():
        number = isinstance(scale, (int, float)) and not isinstance(scale, bool) and isfinite(scale)
        if not number or not 0 < scale <= 1:
            raise ValueError(
                f"rank_scale must be in (0, 1], the share of a head's dimensions that stays, got {scale!r}"
            )
    return scales


def _units(model: nn.Module, kinds: Sequence[FormKind]) -> dict[str, AttentionUnit]:
    """Return every attention module of ``model``, read, or raise with what stands against changing one of them."""
    check_model(model)
    refuse_wrapped(model)
    found = list(find_attention(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no attention that is known here. If it does under another name, say where "
            "its matrices are: fz.register_attention"
        )
    return {read.name: _checked_unit(read, kinds) for read in found}


def _checked_unit(read: Found, kinds: Sequence[FormKind]) -> AttentionUnit:
    name = read.name or type(read.module).__name__
    unit = read.unit
    if unit is None:
        raise ValueError(f"{name}: {read.reason}\nNothing was changed")
    if unit.rotary and "qk" in kinds:
        raise ValueError(
            f"{name}: rotary embeddings turn queries and keys by position, so that Q Kᵀ is no single form and its "
            'factors cannot be mixed (docs/attention.md); use forms=("ov",). Nothing was changed'
        )
    if any(isinstance(projection.weight, DTensor) for projection in unit.projections):
        raise ValueError(f"{name}: its weights are sharded over processes; do this before fully_shard")
    for projection in unit.projections:
        if (reason := why_not_decomposed(projection.weight)) is not None:
            raise ValueError(f"{name}: of its projections, {reason}. Nothing was changed")
    if not unit.query.weight.is_meta:
        check_finite(unit, name)
    return unit


def _plan(
    model: nn.Module, units: Mapping[str, AttentionUnit], kinds: tuple[FormKind, ...], scales: Mapping[FormKind, float]
) -> Plan:
    """Return a plan of nothing but these attention modules, at these scales."""
    candidates = find_candidates(model, LowRank().kernel, None, (), keep_first_and_last=False, attention=kinds)
    ranks = {}
    for candidate in candidates:
        unit = units.get(candidate.name)
        if unit is None:
            continue
        if candidate.reason is not None:
            raise ValueError(f"{candidate.name or 'the model'}: {candidate.reason}. Nothing was changed")
        qk, ov = (round(scales[kind] * unit.head_size) if kind in kinds else unit.head_size for kind in KINDS)
        ranks[candidate.name] = (qk, ov)
    return attention_plan(model, candidates, ranks)
