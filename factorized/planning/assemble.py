"""From solved ranks to the entries of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from factorized.attention.cost import AttentionCost
from factorized.formats.product import LowRank
from factorized.formats.scheme import Scheme
from factorized.nn.running import count_parameters
from factorized.planning.budget import Budget
from factorized.planning.cost import LayerCost, Measured
from factorized.planning.plan import AttentionEntry, Entry, Plan, PlanEntry
from factorized.planning.ranks import Choice
from factorized.planning.select import Candidate

Cost = LayerCost | AttentionCost
Tied = list[Candidate]  # layers that share one weight, the first of them in front; mostly one
Solved = dict[str, tuple[Cost, Choice | None]]  # cost and choice (None: dense) by the name of the first of the tied


def cost_of(tied: Tied, measured: Measured | None) -> Cost:
    """Return what the weight of some tied layers costs, with the calls of all of them; or what attention does."""
    if tied[0].unit is not None:
        seen = measured.attention[tied[0].module] if measured is not None else ()
        return AttentionCost(tied[0].unit, tied[0].kinds, tuple(seen))
    shape = tied[0].shape
    assert shape is not None
    calls = [] if measured is None else [call for candidate in tied for call in measured.calls[candidate.module]]
    return LayerCost(shape, tuple(calls))


def assemble(
    model: nn.Module,
    scheme: Scheme,
    budget: Budget,
    candidates: list[Candidate],
    solved: Solved,
    measured: Measured | None,
) -> Plan:
    """Return the plan: one entry per candidate, and the totals."""
    entries = [_entry(candidate, solved, measured, held) for candidate, held in _held_before(candidates)]
    params = count_parameters(model)
    saved = sum(cost.params(None) - cost.params(choice) for cost, choice in solved.values())
    macs = measured.macs if measured is not None else None
    saved_macs = sum(cost.macs(None) - cost.macs(choice) for cost, choice in solved.values())
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
    solved: Solved,
    measured: Measured | None,
    held_elsewhere: bool,
) -> Entry:
    weight = candidate.module._parameters.get("weight")
    weight = None if weight is not None and is_lazy(weight) else weight
    cost, choice = solved.get(candidate.tied_to or candidate.name, (None, None))
    reason = candidate.reason
    if reason is None and cost is not None and choice is None:
        grows = "would grow: the factors would cost more than the dense layer"
        reason = grows if candidate.unit is None else "at that rank its heads keep their size"
    if candidate.unit is not None:
        return _attention_entry(candidate, cost_of([candidate], measured), choice, reason, measured is not None)
    own = cost_of([candidate], measured) if candidate.shape is not None else None
    format = choice if reason is None else None
    counted = own is not None and measured is not None
    dense_params = weight.numel() if weight is not None else count_parameters(candidate.module)
    return PlanEntry(
        name=candidate.name,
        type=type(candidate.module).__name__,
        shape=tuple(weight.shape) if weight is not None else (),
        format=format,
        reason=reason,
        aliases=candidate.aliases,
        tied_to=candidate.tied_to if reason is None else None,
        params=0 if held_elsewhere else dense_params,
        params_after=0 if held_elsewhere else own.params(format) if own else dense_params,
        macs=own.macs(None) if own is not None and counted else None,
        macs_after=own.macs(format) if own is not None and counted else None,
    )


def _attention_entry(
    candidate: Candidate, cost: Cost, rank: int | None, reason: str | None, counted: bool
) -> AttentionEntry:
    assert isinstance(cost, AttentionCost)
    kept = rank if reason is None else None
    entry = attention_entry(candidate, cost, cost.ranks(kept))
    if kept is None:
        entry = replace(entry, forms=())
    if counted:
        entry = replace(entry, macs=cost.macs(None), macs_after=cost.macs(kept))
    return replace(entry, reason=reason)


def attention_entry(candidate: Candidate, cost: AttentionCost, head_ranks: tuple[int, int]) -> AttentionEntry:
    """Return the entry of an attention module whose forms get these ranks per head."""
    return AttentionEntry(
        name=candidate.name,
        type=type(candidate.module).__name__,
        shape=(cost.unit.query.heads, cost.full_rank),
        aliases=candidate.aliases,
        params=cost.params(None),
        params_after=cost.params_at(*head_ranks),
        head_ranks=head_ranks,
        forms=candidate.kinds,
    )


def attention_plan(model: nn.Module, candidates: list[Candidate], ranks: Mapping[str, tuple[int, int]]) -> Plan:
    """Return a plan of nothing but attention modules, at the ranks per head given by name."""
    chosen = [candidate for candidate in candidates if candidate.name in ranks]
    entries = []
    for candidate in chosen:
        assert candidate.unit is not None
        entries.append(
            attention_entry(candidate, AttentionCost(candidate.unit, candidate.kinds), ranks[candidate.name])
        )
    params = count_parameters(model)
    saved = sum(entry.params - entry.params_after for entry in entries)
    return Plan(type(model).__name__, LowRank(), "per head", tuple(entries), params, params - saved)
