"""``fz.factorize_attention`` and ``fz.spectral_init_attention``: the heads of whole models as products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import cast

from torch import nn
from torch.distributed.tensor import DTensor

from factorized._checks import is_number
from factorized.attention.matrices import check_finite, spectral_matrices, write_matrices
from factorized.attention.register import Found, find_attention
from factorized.attention.unit import FORMS, AttentionUnit, FormName, are_forms
from factorized.attention.verify import check_registrations
from factorized.nn.init import Init, check_init
from factorized.nn.model import Model, check_model, module_names
from factorized.nn.running import ExampleInput
from factorized.planning.assemble import attention_plan
from factorized.planning.projections import attention_candidates
from factorized.planning.replaceable import why_not_decomposed, why_tied
from factorized.surgery.factorize import build_layers, install
from factorized.surgery.replace import refuse_wrapped


def factorize_attention(
    model: Model,
    rank_scale: float | Mapping[FormName, float] = 0.5,
    init: Init = "spectral",
    forms: Sequence[FormName] = FORMS,
    example_input: ExampleInput | None = None,
) -> Model:
    """Shrink the heads of all attention modules of ``model`` in place, and return the model.

    ``"spectral"`` keeps the best approximation of each head's forms by truncated SVD; other inits draw new matrices.
    Biases are adjusted and the softmax scale stays. All modules are changed, or none. A model that is itself one
    attention module cannot be changed in place: use what is returned.

    Args:
        model: any model with attention that ``fz.register_attention`` or the library knows.
        rank_scale: the share of a head's dimensions that stays, in (0, 1]; or one for each form.
        init: as for ``fz.factorize``.
        forms: which forms are shrunk; under rotary embeddings only ``"ov"`` can be.
        example_input: what the model's forward takes, to check how classes were registered.

    Raises:
        ValueError: the model holds no attention of a known class, one of its modules cannot be read or shrunk, or an
            argument has a wrong value.

    Examples:
        >>> model = nn.TransformerEncoderLayer(32, nhead=2, batch_first=True)  # heads of 16 dimensions
        >>> model = fz.factorize_attention(model, rank_scale=0.25)
        >>> model.self_attn.q_proj
        Linear(in_features=32, out_features=8, bias=True)
    """
    check_init(init)
    chosen = _checked_forms(forms)
    scales = _checked_scales(rank_scale, chosen)
    candidates = attention_candidates(model, _units(model, chosen), chosen, example_input)
    ranks: dict[str, tuple[int, int]] = {}
    for candidate in candidates:
        size, name = candidate.unit.head_size, candidate.name
        if candidate.reason is not None:
            raise ValueError(f"{name or 'the model'}: {candidate.reason}. Nothing was changed")
        qk, ov = (round(scales.get(form, 1) * size) for form in FORMS)
        if min(qk, ov) < 1:
            raise ValueError(
                f"rank_scale={min(scales.values()):g} leaves a head of {name or 'the model'!r} without dimensions: it "
                f"has {size}, so ask for {ceil(1e4 / size) / 1e4:g} or more, up to 1. Nothing was changed"
            )
        ranks[name] = (qk, ov)
    plan = attention_plan(model, candidates, ranks)
    return cast(Model, install(model, plan, build_layers(model, plan, init)))


def spectral_init_attention(model: Model, forms: Sequence[FormName] = FORMS) -> Model:
    """Rebalance the factors of every head in place, so that both carry √Σ of their product; return the model.

    The model computes the same function: only the split of each form into its two factors changes (section 3.1). Value
    biases move into the output bias.

    Args:
        model: as for ``fz.factorize_attention``.
        forms: which forms are rebalanced; under rotary embeddings only ``"ov"`` can be.

    Raises:
        ValueError: as for ``fz.factorize_attention``.

    Examples:
        >>> model = nn.TransformerEncoderLayer(32, nhead=2, batch_first=True).eval()
        >>> x = torch.randn(1, 5, 32)
        >>> before = model(x)
        >>> torch.allclose(fz.spectral_init_attention(model)(x), before, atol=1e-5)
        True
    """
    chosen = _checked_forms(forms)
    units = _units(model, chosen)
    places = module_names(model)
    if tied := why_tied(model, units):
        module, reason = next(iter(tied.items()))
        raise ValueError(f"{places[module][0] or 'the model'}: {reason}. Nothing was changed")
    check_registrations({places[unit.module][0]: unit for unit in units}, model)
    new = [
        spectral_matrices(unit, unit.query.head_size, unit.value.head_size, chosen, may_add_bias=False)
        for unit in units
    ]
    for unit, matrices in zip(units, new, strict=True):
        write_matrices(unit, matrices)
    return model


def _checked_forms(forms: Sequence[FormName]) -> tuple[FormName, ...]:
    if not are_forms(forms) or not forms:
        raise ValueError(f'forms must be a list of "qk" and "ov", or one of them, got {forms!r}')
    return tuple(form for form in FORMS if form in forms)


def _checked_scales(rank_scale: float | Mapping[FormName, float], forms: Sequence[FormName]) -> dict[FormName, float]:
    if isinstance(rank_scale, Mapping):
        if set(rank_scale) != set(forms):
            raise ValueError(f"rank_scale must name each of forms={tuple(forms)} and nothing else, got {rank_scale!r}")
        scales = {form: rank_scale[form] for form in forms}
    else:
        scales = dict.fromkeys(forms, rank_scale)
    for scale in scales.values():
        if not (is_number(scale) and 0 < scale <= 1):
            raise ValueError(
                f"rank_scale must be in (0, 1], the share of a head's dimensions that stays, got {scale!r}"
            )
    return scales


def _units(model: nn.Module, forms: Sequence[FormName]) -> list[AttentionUnit]:
    """Read every attention module of ``model``; raise with the reason if one of them cannot be changed."""
    check_model(model)
    refuse_wrapped(model)
    found = list(find_attention(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no attention of a known class. If it holds one of another class, register "
            "where its matrices are: fz.register_attention"
        )
    return [_checked_unit(read, forms) for read in found]


def _checked_unit(read: Found, forms: Sequence[FormName]) -> AttentionUnit:
    name = read.name or type(read.module).__name__
    unit = read.unit
    if unit is None:
        raise ValueError(f"{name}: {read.reason}\nNothing was changed")
    if unit.rotary and "qk" in forms:
        raise ValueError(
            f"{name}: rotary embeddings rotate queries and keys by position, so that Q Kᵀ is not a single form and its "
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
