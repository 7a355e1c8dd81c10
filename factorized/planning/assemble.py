"""Make the entries of a plan from solved ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from factorized.attention.cost import AttentionCost
from factorized.formats.product import LowRank
from factorized.formats.scheme import Scheme
from factorized.nn.model import dotted, own_parameter
from factorized.nn.running import count_parameters
from factorized.planning.budget import Budget
from factorized.planning.candidate import AttentionCandidate, Candidate, LayerCandidate, Selected
from factorized.planning.cost import LayerCost, Measured
from factorized.planning.plan import AttentionEntry, Entry, Plan, PlanEntry
from factorized.planning.ranks import Choice

Cost = LayerCost | AttentionCost
Tied = list[Selected]  # layers that share one weight, in order; usually just one
WhyDense = Callable[[LayerCost], str]
Solved = dict[str, tuple[Cost, Choice | None]]  # cost and choice (None: dense) by the name of the first tied layer


def cost_of(tied: Tied, measured: Measured | None) -> Cost:
    """Return the cost of the weight of some tied layers, with the calls of all of them, or the cost of attention."""
    first = tied[0]
    if isinstance(first, AttentionCandidate):
        return _attention_cost(first, measured)
    return _layer_cost(first, tied, measured)


def _attention_cost(candidate: AttentionCandidate, measured: Measured | None) -> AttentionCost:
    seen = measured.attention[candidate.module] if measured is not None else ()
    return AttentionCost(candidate.unit, candidate.forms, tuple(seen))


def _layer_cost(first: LayerCandidate, tied: Sequence[Candidate], measured: Measured | None) -> LayerCost:
    calls = [] if measured is None else [call for candidate in tied for call in measured.calls[candidate.module]]
    return LayerCost(first.shape, tuple(calls))


def assemble(
    model: nn.Module,
    scheme: Scheme,
    budget: Budget,
    candidates: list[Candidate],
    solved: Solved,
    measured: Measured | None,
) -> Plan:
    """Return the plan: one entry per candidate and per matrix that no layer holds, and the totals."""

    def why_dense(cost: LayerCost) -> str:
        if budget.name == "macs" and not cost.calls:
            return "does not run on example_input, so that no multiply-accumulates would be saved"
        if scheme.compresses:
            return "would grow: the factors would cost more than the dense layer"
        return f"{budget} is above its full rank"

    entries = [_entry(candidate, solved, measured, held, why_dense) for candidate, held in _held_before(candidates)]
    entries += _loose_entries(model, candidates)
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
        weight = own_parameter(candidate.module, "weight")
        yield candidate, weight in seen
        if weight is not None:
            seen.add(weight)


def _entry(
    candidate: Candidate, solved: Solved, measured: Measured | None, held_elsewhere: bool, why_dense: WhyDense
) -> Entry:
    if isinstance(candidate, AttentionCandidate):
        return _planned_attention(candidate, solved, measured)
    weight = own_parameter(candidate.module, "weight")
    weight = None if weight is not None and is_lazy(weight) else weight
    params = weight.numel() if weight is not None else count_parameters(candidate.module)
    entry = PlanEntry(
        name=candidate.name,
        type=type(candidate.module).__name__,
        shape=tuple(weight.shape) if weight is not None else (),
        reason=candidate.reason,
        aliases=candidate.aliases,
        params=0 if held_elsewhere else params,
        params_after=0 if held_elsewhere else params,
    )
    return (
        _planned_layer(entry, candidate, solved, measured, why_dense)
        if isinstance(candidate, LayerCandidate)
        else entry
    )


def _planned_layer(
    entry: PlanEntry, candidate: LayerCandidate, solved: Solved, measured: Measured | None, why_dense: WhyDense
) -> PlanEntry:
    """Return the entry of a layer with its format, or why it has none, and what that costs."""
    cost = _layer_cost(candidate, [candidate], measured)
    if measured is not None:
        entry = replace(entry, macs=cost.macs(None), macs_after=cost.macs(None))
    if candidate.reason is not None:
        return entry
    _, format = solved[candidate.tied_to or candidate.name]
    if format is None:
        return replace(entry, reason=why_dense(cost))
    return replace(
        entry,
        format=format,
        tied_to=candidate.tied_to,
        params_after=cost.params(format) if entry.params else 0,
        macs_after=None if measured is None else cost.macs(format),
    )


def _planned_attention(candidate: AttentionCandidate, solved: Solved, measured: Measured | None) -> AttentionEntry:
    """Return the entry of an attention module with its ranks, or the reason why it keeps them, and what that costs."""
    cost = _attention_cost(candidate, measured)
    reason, rank = candidate.reason, None
    if reason is None:
        _, rank = solved[candidate.name]
        reason = "at that rank its heads keep their size" if rank is None else None
    entry = attention_entry(candidate, cost, cost.ranks(rank))
    if measured is not None:
        entry = replace(entry, macs=cost.macs(None), macs_after=cost.macs(rank))
    return entry if reason is None else replace(entry, forms=(), reason=reason)


def _loose_entries(model: nn.Module, candidates: Sequence[Candidate]) -> list[PlanEntry]:
    """Return a dense entry, with its reason, for every matrix or stack of matrices that no candidate holds."""
    seen: set[Tensor] = {p for candidate in candidates for p in candidate.module.parameters()}
    entries = []
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter in seen or is_lazy(parameter):
                continue
            seen.add(parameter)
            if sum(extent > 1 for extent in parameter.shape) >= 2:
                entries.append(_loose_entry(dotted(name, key), type(module).__name__, parameter))
    return entries


def _loose_entry(name: str, holder: str, parameter: Tensor) -> PlanEntry:
    stack = parameter.dim() == 3 and parameter.shape[0] > 1
    what = f"a stack of {parameter.shape[0]} matrices" if stack else "a parameter"
    return PlanEntry(
        name=name,
        type=type(parameter).__name__,
        shape=tuple(parameter.shape),
        reason=f"{what} in {holder}, which is not a layer that can be replaced",
        params=parameter.numel(),
        params_after=parameter.numel(),
    )


def attention_entry(candidate: AttentionCandidate, cost: AttentionCost, head_ranks: tuple[int, int]) -> AttentionEntry:
    """Return the entry of an attention module whose forms get these ranks per head."""
    return AttentionEntry(
        name=candidate.name,
        type=type(candidate.module).__name__,
        shape=(cost.unit.query.heads, cost.full_rank),
        aliases=candidate.aliases,
        params=cost.params(None),
        params_after=cost.params_at(*head_ranks),
        head_ranks=head_ranks,
        forms=candidate.forms,
        note=candidate.note,
    )


def attention_plan(
    model: nn.Module, candidates: Sequence[AttentionCandidate], ranks: Mapping[str, tuple[int, int]]
) -> Plan:
    """Return a plan of attention modules only, at the ranks per head given by name."""
    entries = [attention_entry(c, AttentionCost(c.unit, c.forms), ranks[c.name]) for c in candidates]
    params = count_parameters(model)
    saved = sum(entry.params - entry.params_after for entry in entries)
    return Plan(type(model).__name__, LowRank(), "per head", tuple(entries), params, params - saved)
