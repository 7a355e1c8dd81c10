"""``fz.plan``: from a model and a budget to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import ceil
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from factorized.maths.kernel import to_matrix
from factorized.planning.budget import Budget, read_budget
from factorized.planning.cost import Call, ExampleInput, LayerCost, Measured, count_parameters, measure
from factorized.planning.plan import Plan, PlanEntry
from factorized.planning.ranks import Item, Ranks, lowest_cost, scaled_ranks, spend_by_spectrum, spend_uniformly
from factorized.planning.scheme import LowRank, Scheme, reference_size
from factorized.planning.select import Candidate, Pattern, find_candidates

Allocate = Literal["uniform", "spectrum"]
Tied = list[Candidate]  # layers that share one weight, the first of them in front; mostly one


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
) -> Plan:
    """Choose which layers of ``model`` to factorize, and their ranks; the model is not changed.

    Exactly one of ``ratio``, ``rank_scale``, ``rank``, ``energy`` and ``macs`` is given; ``Overcomplete`` needs none.

    Args:
        model: any ``nn.Module``, on the meta device too.
        scheme: ``LowRank()`` unless given.
        ratio: parameters of the whole model after over before; never exceeded, and met to one rank step.
        rank_scale: the paper's rule: ``round(scale · out·kh)`` for convolutions, ``round(scale · min(m, n))`` else.
        rank: the same rank everywhere.
        energy: share of each layer's squared singular values to keep.
        macs: multiply-accumulates of the whole model after over before, on ``example_input``.
        example_input: what the model's forward takes (a tensor, a tuple, a dict); fills the plan's MACs.
        allocate: ``"uniform"`` spends a budget at one rank scale (the paper), ``"spectrum"`` where the singular values
            of the weights at hand earn most.
        include: only these layers: names, globs, names of containers, or module types.
        exclude: not these.
        keep_first_and_last: leave the first and last layer dense, as the paper does, unless ``include`` names them.
    """
    scheme = LowRank() if scheme is None else scheme
    given = {"ratio": ratio, "rank_scale": rank_scale, "rank": rank, "energy": energy, "macs": macs}
    budget = read_budget(scheme, allocate, example_input is not None, given)
    candidates = find_candidates(model, scheme.kind, include, exclude, keep_first_and_last)
    weights = _tied_groups(candidates)
    if not weights:
        raise ValueError(_nothing_selected(model, candidates))
    shapes = {c.module: c.shape for c in candidates if c.shape is not None}
    measured = measure(model, example_input, shapes) if example_input is not None else None
    costs = [_cost(tied, scheme, measured) for tied in weights]
    ranks = _solve(model, scheme, budget, allocate, weights, costs, measured)
    if all(rank is None for rank in ranks):
        raise ValueError(
            f"{budget} leaves every layer of {type(model).__name__} dense: factorizing at that rank would make them "
            "larger. Ask for less"
        )
    return _assemble(model, scheme, budget, candidates, weights, costs, ranks, measured)


def _tied_groups(candidates: list[Candidate]) -> list[Tied]:
    groups: dict[str, Tied] = {}
    for candidate in candidates:
        if candidate.reason is None:
            groups.setdefault(candidate.tied_to or candidate.name, []).append(candidate)
    return list(groups.values())


def _cost(tied: Tied, scheme: Scheme, measured: Measured | None) -> LayerCost:
    shape = tied[0].shape
    assert shape is not None
    calls: dict[bool, tuple[Call, ...]] = {False: (), True: ()}
    for candidate in tied if measured is not None else ():
        assert measured is not None
        calls[isinstance(candidate.module, nn.Embedding)] += tuple(measured.calls[candidate.module])
    return LayerCost(shape, scheme.depth, multiplied=calls[False], looked_up=calls[True])


def _solve(
    model: nn.Module,
    scheme: Scheme,
    budget: Budget,
    allocate: Allocate,
    weights: list[Tied],
    costs: list[LayerCost],
    measured: Measured | None,
) -> Ranks:
    by_macs = budget.name == "macs"
    items = [_item(cost, scheme, by_macs) for cost in costs]
    if budget.name == "rank_scale":
        return scaled_ranks(items, budget.value)
    if budget.name == "rank":
        return [
            item.settle(_checked_rank(tied[0], scheme, int(budget.value)))
            for item, tied in zip(items, weights, strict=True)
        ]
    if budget.name == "energy":
        return [
            item.settle(_rank_for_energy(_energies(tied[0]), budget.value))
            for item, tied in zip(items, weights, strict=True)
        ]
    whole = measured.macs if by_macs and measured is not None else count_parameters(model)
    rest = whole - sum(item.cost(None) for item in items)
    target = _largest_within(budget.value, whole) - rest
    if target < lowest_cost(items):
        lowest = ceil((rest + lowest_cost(items)) / whole * 1e4) / 1e4  # rounded up, so that asking for it works
        allowed = f"{lowest:.4f}..1" if isinstance(scheme, LowRank) else f"{lowest:.4f} or more"
        raise ValueError(
            f"{budget} is out of reach for {type(model).__name__}: with rank 1 everywhere it still keeps {lowest:.4f} "
            f"of its {whole:,} {'multiply-accumulates' if by_macs else 'parameters'}. Ask for {allowed}, or "
            "factorize more layers: see include=, exclude= and keep_first_and_last="
        )
    if allocate == "spectrum":
        return spend_by_spectrum(items, [_energies(tied[0]).tolist() for tied in weights], target)
    return spend_uniformly(items, target)


def _largest_within(share: float, whole: int) -> int:
    """Return the largest count whose share of ``whole`` is at most ``share``."""
    count = int(share * whole) + 1
    while count / whole > share:
        count -= 1
    return count


def _item(cost: LayerCost, scheme: Scheme, by_macs: bool) -> Item:
    return Item(
        cost=cost.macs if by_macs else cost.params,
        rank_at=lambda scale: scheme.rank(cost.shape, scale),
        reference=reference_size(cost.shape),
        may_stay_dense=isinstance(scheme, LowRank),
    )


def _checked_rank(candidate: Candidate, scheme: Scheme, rank: int) -> int:
    assert candidate.shape is not None
    full = candidate.shape.full_rank
    if isinstance(scheme, LowRank) and rank > full:
        raise ValueError(
            f"rank must be in 1..{full} for layer {candidate.name!r} ({candidate.shape}), got {rank}; "
            'use Overcomplete("wide") to go above full rank, or exclude= this layer'
        )
    return rank


@torch.no_grad()
def _energies(candidate: Candidate) -> Tensor:  # (full rank,)
    """Return the squared singular values of a weight, summed over its groups."""
    weight = candidate.module.weight
    assert isinstance(weight, Tensor)
    assert candidate.shape is not None
    if weight.is_meta:
        raise ValueError(
            f"{candidate.name}: singular values need weights, but the model is on the meta device; "
            'load it, or plan by ratio= or rank_scale= with allocate="uniform"'
        )
    matrix = to_matrix(weight, candidate.shape)
    matrix = matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix
    if not torch.isfinite(matrix).all():
        raise ValueError(f"{candidate.name}: weight holds NaN or infinite values, so it has no singular values")
    return torch.linalg.svdvals(matrix).double().square().sum(dim=0)


def _rank_for_energy(energies: Tensor, share: float) -> int:
    kept = list(accumulate(energies.tolist()))
    return next(rank for rank, energy in enumerate(kept, start=1) if energy >= share * kept[-1])


def _assemble(
    model: nn.Module,
    scheme: Scheme,
    budget: Budget,
    candidates: list[Candidate],
    weights: list[Tied],
    costs: list[LayerCost],
    ranks: Ranks,
    measured: Measured | None,
) -> Plan:
    solved = {tied[0].name: (cost, rank) for tied, cost, rank in zip(weights, costs, ranks, strict=True)}
    entries = [_entry(candidate, scheme, solved, measured, held) for candidate, held in _held_before(candidates)]
    params = count_parameters(model)
    saved = sum(cost.params(None) - cost.params(rank) for cost, rank in solved.values())
    macs = measured.macs if measured is not None else None
    saved_macs = sum(cost.macs(None) - cost.macs(rank) for cost, rank in solved.values())
    return Plan(
        model=type(model).__name__,
        scheme=scheme,
        budget=str(budget),
        entries=tuple(entries),
        params=params,
        params_after=params - saved,
        macs=macs,
        macs_after=macs - saved_macs if macs is not None else None,
    )


def _held_before(candidates: list[Candidate]) -> Iterator[tuple[Candidate, bool]]:
    """Yield every candidate with whether an earlier one holds the same weight."""
    seen: set[Tensor] = set()
    for candidate in candidates:
        weight = candidate.module._parameters.get("weight")
        yield candidate, weight in seen
        if weight is not None:
            seen.add(weight)


def _entry(
    candidate: Candidate,
    scheme: Scheme,
    solved: dict[str, tuple[LayerCost, int | None]],
    measured: Measured | None,
    held_elsewhere: bool,
) -> PlanEntry:
    weight = candidate.module._parameters.get("weight")
    weight = None if weight is not None and is_lazy(weight) else weight
    cost, rank = solved.get(candidate.tied_to or candidate.name, (None, None))
    reason = candidate.reason
    if reason is None and cost is not None and rank is None:
        reason = "would grow: the factors would cost more than the dense layer"
    own = _cost([candidate], scheme, measured) if candidate.shape is not None else None
    dense_params = weight.numel() if weight is not None else count_parameters(candidate.module)
    return PlanEntry(
        name=candidate.name,
        type=type(candidate.module).__name__,
        shape=tuple(weight.shape) if weight is not None else (),
        groups=candidate.shape.groups if candidate.shape is not None else 1,
        rank=rank if reason is None else None,
        kind=scheme.kind,
        depth=scheme.depth,
        reason=reason,
        aliases=candidate.aliases,
        tied_to=candidate.tied_to if reason is None else None,
        params=0 if held_elsewhere else dense_params,
        params_after=0 if held_elsewhere else own.params(rank if reason is None else None) if own else dense_params,
        macs=own.macs(None) if own is not None and measured is not None else None,
        macs_after=own.macs(rank if reason is None else None) if own is not None and measured is not None else None,
    )


def _nothing_selected(model: nn.Module, candidates: list[Candidate]) -> str:
    reasons = "; ".join(f"{c.name or 'the model itself'}: {c.reason}" for c in candidates[:4])
    more = f"; and {len(candidates) - 4} more" if len(candidates) > 4 else ""
    found = (
        f"all of its layers are left out ({reasons}{more})" if candidates else "it has no layer with a weight matrix"
    )
    return f"nothing to factorize in {type(model).__name__}: {found}. See include=, exclude=, keep_first_and_last="
