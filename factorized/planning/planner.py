"""``fz.plan``: from a model and a budget to a plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Literal

from torch import nn

from factorized.attention.cost import AttentionCost
from factorized.attention.unit import KINDS, FormKind, are_kinds
from factorized.formats.product import LowRank
from factorized.formats.scheme import Scheme
from factorized.nn.model import check_model, named
from factorized.nn.running import ExampleInput, count_parameters
from factorized.planning.assemble import Cost, Tied, assemble, cost_of
from factorized.planning.budget import Budget, read_budget
from factorized.planning.cost import LayerCost, Measured, measure
from factorized.planning.plan import Plan
from factorized.planning.ranks import (
    Choice,
    Choices,
    Item,
    lowest_cost,
    scaled_ranks,
    spend_by_spectrum,
    spend_uniformly,
    total_cost,
)
from factorized.planning.select import Candidate, Pattern, find_candidates
from factorized.planning.spectrum import rank_for_energy, squared_spectrum

Allocate = Literal["uniform", "spectrum"]


def plan(
    model: nn.Module,
    scheme: Scheme | None = None,
    *,
    ratio: float | None = None,
    rank_scale: float | None = None,
    rank: int | None = None,
    energy: float | None = None,
    macs: float | None = None,
    example_input: ExampleInput | None = None,
    allocate: Allocate = "uniform",
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] = (),
    keep_first_and_last: bool = True,
    attention: bool | Sequence[FormKind] = False,
) -> Plan:
    """Choose which layers of ``model`` to factorize, and their ranks; the model is not changed.

    Exactly one of ``ratio``, ``rank_scale``, ``rank``, ``energy`` and ``macs`` is given; ``Overcomplete`` needs none.

    Args:
        model: any ``nn.Module``, on the meta device too.
        scheme: ``LowRank()`` unless given.
        ratio: parameters of the whole model after over before; never exceeded, and met to one rank step.
        rank_scale: the paper's rule: ``round(scale · out·kh)`` for convolutions, ``round(scale · min(m, n))`` else;
            of tensors as ``TensorTrain`` and ``Tucker`` say.
        rank: the same rank everywhere.
        energy: share of each layer's squared singular values to keep.
        macs: multiply-accumulates of the whole model after over before, on ``example_input``.
        example_input: what the model's forward takes (a tensor, a tuple, a dict); fills the plan's MACs.
        allocate: ``"uniform"`` spends a budget at one rank scale (the paper), ``"spectrum"`` where the singular values
            of the weights at hand earn most.
        include: only these layers: names, globs, names of containers, or module types.
        exclude: not these.
        keep_first_and_last: leave the first and last layer dense, as the paper does, unless ``include`` names them.
        attention: spend the budget on attention modules too, each one unit whose heads get fewer dimensions: True for
            both of its forms (OV alone under rotary embeddings), or the forms, ``("qk", "ov")`` or one of them.
    """
    check_model(model)
    scheme = LowRank() if scheme is None else scheme
    given = {"ratio": ratio, "rank_scale": rank_scale, "rank": rank, "energy": energy, "macs": macs}
    budget = read_budget(scheme, allocate, example_input is not None, given)
    kinds = _read_attention(scheme, attention)
    candidates = find_candidates(model, scheme.kernel, include, exclude, keep_first_and_last, scheme.refuse, kinds)
    weights = _tied_groups(candidates)
    if not weights:
        raise ValueError(_nothing_selected(model, candidates))
    shapes = {c.module: c.shape for c in candidates if c.shape is not None}
    units = {c.module: c.unit for c in candidates if c.unit is not None}
    measured = measure(model, example_input, shapes, units) if example_input is not None else None
    costs = [cost_of(tied, measured) for tied in weights]
    ranks = _solve(model, scheme, budget, allocate, weights, costs, measured)
    if all(rank is None for rank in ranks):
        raise ValueError(
            f"{budget} leaves every layer of {type(model).__name__} dense: factorizing at that rank would make them "
            "larger. Ask for less"
        )
    solved = {tied[0].name: (cost, rank) for tied, cost, rank in zip(weights, costs, ranks, strict=True)}
    return assemble(model, scheme, budget, candidates, solved, measured)


def _read_attention(scheme: Scheme, attention: bool | Sequence[FormKind]) -> tuple[FormKind, ...]:
    if isinstance(attention, bool):
        kinds = KINDS if attention else ()
    elif not are_kinds(attention):
        raise ValueError(f'attention must be True, False or a list of "qk" and "ov", got {attention!r}')
    else:
        kinds = tuple(kind for kind in KINDS if kind in attention)
    if kinds and not scheme.by_spectrum:
        raise ValueError(f"attention={attention!r} gives heads fewer dimensions, which is for LowRank, got {scheme}")
    return kinds


def _tied_groups(candidates: list[Candidate]) -> list[Tied]:
    groups: dict[str, Tied] = {}
    for candidate in candidates:
        if candidate.reason is None:
            groups.setdefault(candidate.tied_to or candidate.name, []).append(candidate)
    return list(groups.values())


def _solve(
    model: nn.Module,
    scheme: Scheme,
    budget: Budget,
    allocate: Allocate,
    weights: list[Tied],
    costs: list[Cost],
    measured: Measured | None,
) -> Choices:
    by_macs = budget.name == "macs"
    items = []
    made: dict[LayerCost, Item] = {}  # equal layers are one item
    for tied, cost in zip(weights, costs, strict=True):
        if isinstance(cost, AttentionCost):
            items.append(_attention_item(cost, by_macs))
            continue
        with named(tied[0].name):
            made[cost] = made.get(cost) or _item(cost, scheme, by_macs)
        items.append(made[cost])
    if budget.name in ("rank", "rank_scale"):
        _warn_if_clipped(scheme, budget, weights)
    if budget.name == "rank_scale":
        return scaled_ranks(items, budget.value)
    if budget.name == "rank":
        return [
            item.settle(_at_rank(tied[0], scheme, int(budget.value))) for item, tied in zip(items, weights, strict=True)
        ]
    if budget.name == "energy":
        return [
            item.settle(_at_rank(tied[0], scheme, rank_for_energy(squared_spectrum(tied[0]), budget.value)))
            for item, tied in zip(items, weights, strict=True)
        ]
    whole = measured.macs if by_macs and measured is not None else count_parameters(model)
    rest = whole - sum(item.cost(None) for item in items)
    target = _largest_within(budget.value, whole) - rest
    if target < lowest_cost(items):
        lowest = ceil((rest + lowest_cost(items)) / whole * 1e4) / 1e4  # rounded up, so that asking for it works
        allowed = f"{lowest:.4f}..1" if scheme.compresses else f"{lowest:.4f} or more"
        more = "attention=, " if scheme.by_spectrum else ""
        floor = "full rank everywhere, the lowest of Overcomplete," if scheme.least_scale else "rank 1 everywhere"
        raise ValueError(
            f"{budget} is out of reach for {type(model).__name__}: with {floor} it still keeps {lowest:.4f} "
            f"of its {whole:,} {'multiply-accumulates' if by_macs else 'parameters'}. Ask for {allowed}, or "
            f"factorize more layers: see {more}include=, exclude= and keep_first_and_last="
        )
    if allocate == "spectrum":
        return spend_by_spectrum(items, [squared_spectrum(tied[0]).tolist() for tied in weights], target)
    ranks = spend_uniformly(items, target)
    highest = rest + total_cost(items, ranks)
    if highest < 0.99 * target + rest and all(item.is_highest(rank) for item, rank in zip(items, ranks, strict=True)):
        raise ValueError(
            f"{budget} is out of reach for {type(model).__name__}: at full rank everywhere, {scheme} keeps only "
            f"{highest / whole:.4f} of its {whole:,} parameters. Ask for less, or factorize fewer layers: see include= "
            "and exclude="
        )
    return ranks


def _largest_within(share: float, whole: int) -> int:
    """Return the largest count whose share of ``whole`` is at most ``share``."""
    count = int(share * whole) + 1
    while count / whole > share:
        count -= 1
    return count


def _attention_item(cost: AttentionCost, by_macs: bool) -> Item:
    full = cost.full_rank
    return Item(
        cost=cost.macs if by_macs else cost.params,
        at_scale=lambda scale: min(max(1, round(scale * full)), full),
        reference=full,
        may_stay_dense=True,
        higher=lambda rank: [rank + 1],
        lower=lambda rank: [rank - 1] if rank > 1 else [],
        ranks=lambda rank: (rank,),
    )


def _item(cost: LayerCost, scheme: Scheme, by_macs: bool) -> Item:
    return Item(
        cost=cost.macs if by_macs else cost.params,
        at_scale=partial(scheme.at_scale, cost.shape),
        reference=scheme.reference(cost.shape),
        may_stay_dense=scheme.compresses,
        higher=lambda format: format.raised(),
        lower=lambda format: format.lowered(),
        ranks=lambda format: format.rank if isinstance(format.rank, tuple) else (format.rank,),
        coarse=not scheme.at_scale(cost.shape, 0.0).is_product,
    )


def _at_rank(candidate: Candidate, scheme: Scheme, rank: int) -> Choice:
    if candidate.unit is not None:
        full = candidate.unit.head_size
        if rank > full:
            raise ValueError(
                f"rank must be in 1..{full} for the heads of {candidate.name!r}, got {rank}; exclude= it, or shrink "
                "attention by a call of its own: fz.factorize_attention(model, rank_scale=...)"
            )
        return rank
    shape = candidate.shape
    assert shape is not None
    with named(candidate.name):
        return scheme.at_rank(shape, rank)


def _warn_if_clipped(scheme: Scheme, budget: Budget, weights: list[Tied]) -> None:
    """Warn, once for all layers, where a rank or a rank scale asks for more than some allow."""
    scale = budget.value if budget.name == "rank_scale" else None
    rank = int(budget.value) if budget.name == "rank" else None
    shapes = {tied[0].name: tied[0].shape for tied in weights if tied[0].shape is not None}
    found = {name: text for name, shape in shapes.items() if (text := scheme.clipped(shape, scale, rank))}
    if found:
        name, text = next(iter(found.items()))
        warnings.warn(
            f"{budget} is above what {len(found)} of {len(shapes)} layers allow, such as {name!r} {text}; the plan "
            "shows the real ranks",
            stacklevel=4,
        )


def _nothing_selected(model: nn.Module, candidates: list[Candidate]) -> str:
    reasons = "; ".join(f"{c.name or 'the model itself'}: {c.reason}" for c in candidates[:4])
    more = f"; and {len(candidates) - 4} more" if len(candidates) > 4 else ""
    found = (
        f"all of its layers are left out ({reasons}{more})" if candidates else "it has no layer with a weight matrix"
    )
    return f"nothing to factorize in {type(model).__name__}: {found}. See include=, exclude=, keep_first_and_last="
