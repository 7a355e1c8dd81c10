"""Choose a rank for each selected layer, within a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from torch import nn

from factorized._checks import warn
from factorized.attention.cost import AttentionCost
from factorized.formats.scheme import Scheme, scaled_rank
from factorized.nn.model import named
from factorized.nn.running import ExampleInput, count_parameters
from factorized.planning.assemble import Cost, Tied, cost_of
from factorized.planning.budget import Budget
from factorized.planning.candidate import AttentionCandidate, Candidate, LayerCandidate, Selected
from factorized.planning.cost import LayerCost, Measured, measure
from factorized.planning.multiples import WIDE, chosen_multiples, in_multiples, to_multiple
from factorized.planning.ranks import (
    Choice,
    Choices,
    Item,
    lowest_cost,
    spend_by_spectrum,
    spend_uniformly,
)
from factorized.planning.spectrum import rank_for_energy


@dataclass(frozen=True)
class Problem:
    """The weights that a budget is spent on, and the rest of what it counts."""

    scheme: Scheme
    budget: Budget
    candidates: list[Candidate]
    weights: list[Tied]
    costs: list[Cost]
    items: list[Item]  # one for each weight
    measured: Measured | None
    whole: int  # what the budget is a share of
    rest: int  # the part of it that no choice changes

    @property
    def target(self) -> int:
        """The most that all weights may cost together."""
        return _largest_within(self.budget.value, self.whole) - self.rest

    @property
    def lowest(self) -> float:
        """The lowest share that can be reached, rounded up so that asking for it works."""
        return ceil((self.rest + lowest_cost(self.items)) / self.whole * 1e4) / 1e4


def pose(
    model: nn.Module,
    scheme: Scheme,
    budget: Budget,
    candidates: list[Candidate],
    example_input: ExampleInput | None,
) -> Problem:
    """Return the weights among the candidates with what they cost; the model is run once if there is an example."""
    weights = _tied_groups(candidates)
    measured = None
    if example_input is not None:
        shapes = {c.module: c.shape for c in candidates if isinstance(c, LayerCandidate)}
        units = {c.module: c.unit for c in candidates if isinstance(c, AttentionCandidate)}
        measured = measure(model, example_input, shapes, units)
    costs = [cost_of(tied, measured) for tied in weights]
    items = _items(scheme, budget, weights, costs)
    dense = sum(item.cost(None) for item in items)
    whole = dense
    if budget.of == "model":
        whole = measured.macs if budget.name == "macs" and measured is not None else count_parameters(model)
    if budget.name == "macs" and weights and not whole:
        which = type(model).__name__ if budget.of == "model" else "the selected layers"
        raise ValueError(
            f"{budget} is a share of what {which} multiply on example_input, which is nothing; give an input that runs "
            "through more layers, or use ratio="
        )
    return Problem(scheme, budget, candidates, weights, costs, items, measured, whole, whole - dense)


def solve(problem: Problem, spectra: Sequence[Sequence[float]] | None) -> Choices:
    """Return a choice for every weight, None where it stays dense.

    ``spectra`` says what every rank of every weight keeps: for ``energy``, and to spend a share by; without it a share
    is spent uniformly.
    """
    scheme, budget, items, weights = problem.scheme, problem.budget, problem.items, problem.weights
    if budget.name in ("rank", "rank_scale"):
        _warn_if_clipped(scheme, budget, weights)
    if budget.is_share:
        return _spend(problem, spectra)
    multiple = budget.multiple_of or 1
    if budget.name == "rank_scale":
        found: Sequence[Choice | None] = [item.at_scale(budget.value) for item in items]
    elif budget.name == "rank":
        found = _at_one_rank(scheme, weights, int(budget.value))
    else:
        kept = [rank_for_energy(energies, budget.value) for energies in spectra or ()]
        found = [_at_rank(tied[0], scheme, rank) for tied, rank in zip(weights, kept, strict=True)]
    nearest = ceil if budget.name == "energy" else round  # no less energy than was asked for
    return [
        None if choice is None else item.settle(to_multiple(item, choice, multiple, nearest))
        for item, choice in zip(items, found, strict=True)
    ]


def _spend(problem: Problem, spectra: Sequence[Sequence[float]] | None) -> Choices:
    """Spend a share on exact ranks, then again in multiples on the layers whose ranks are rounded by default."""

    def spend(items: Mapping[int, Item], budget: int) -> Choices:
        if spectra is not None:
            return spend_by_spectrum([*items.values()], [spectra[index] for index in items], budget)
        return spend_uniformly([*items.values()], budget)

    choices = spend(dict(enumerate(problem.items)), problem.target)
    if problem.budget.multiple_of is not None or not problem.scheme.compresses:
        return choices
    made: dict[tuple[Item, int], Item] = {}  # equal layers stay one item
    rounded: dict[int, Item] = {}
    for index, multiple in enumerate(chosen_multiples(problem.items, choices, problem.target)):
        item = problem.items[index]
        if multiple > 1:
            rounded[index] = made.setdefault((item, multiple), in_multiples(item, multiple))
    left = problem.target - sum(i.cost(choices[n]) for n, i in enumerate(problem.items) if n not in rounded)
    for index, choice in zip(rounded, spend(rounded, left), strict=True):
        choices[index] = choice
    return choices


def _tied_groups(candidates: list[Candidate]) -> list[Tied]:
    groups: dict[str, Tied] = {}
    for candidate in candidates:
        if isinstance(candidate, Selected) and candidate.reason is None:
            groups.setdefault(candidate.tied_to or candidate.name, []).append(candidate)
    return list(groups.values())


def _items(scheme: Scheme, budget: Budget, weights: list[Tied], costs: list[Cost]) -> list[Item]:
    by_macs = budget.name == "macs"
    multiple = budget.multiple_of if budget.is_share and budget.multiple_of is not None else 1
    items = []
    made: dict[LayerCost, Item] = {}  # equal layers are one item
    for tied, cost in zip(weights, costs, strict=True):
        if isinstance(cost, AttentionCost):
            items.append(in_multiples(_attention_item(cost, by_macs), multiple))
            continue
        with named(tied[0].name):
            made[cost] = made.get(cost) or in_multiples(_item(cost, scheme, by_macs), multiple)
        items.append(made[cost])
    return items


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
        at_scale=lambda scale: min(scaled_rank(full, scale), full),
        reference=full,
        may_stay_dense=True,
        higher=lambda rank: [rank + 1],
        lower=lambda rank: [rank - 1] if rank > 1 else [],
        ranks=lambda rank: (rank,),
        with_rank=lambda rank: rank,
    )


def _item(cost: LayerCost, scheme: Scheme, by_macs: bool) -> Item:
    lowest: Choice = scheme.at_scale(cost.shape, 0.0)
    return Item(
        cost=cost.macs if by_macs else cost.params,
        at_scale=partial(scheme.at_scale, cost.shape),
        reference=scheme.reference(cost.shape),
        may_stay_dense=scheme.compresses,
        higher=lambda format: format.raised(),
        lower=lambda format: format.lowered(),
        ranks=lambda format: format.ranks,
        coarse=not lowest.is_product,
        with_rank=(lambda rank: replace(lowest, rank=rank)) if lowest.is_product else None,
        wide=not cost.shape.size and max(cost.shape.rows, cost.shape.columns) >= WIDE,
    )


def _at_one_rank(scheme: Scheme, weights: list[Tied], rank: int) -> Choices:
    """Return every weight at one rank; None (dense) where that is above full rank. Raise if it is so everywhere."""
    found: Choices = []
    refused: list[ValueError] = []
    for tied in weights:
        try:
            found.append(_at_rank(tied[0], scheme, rank))
        except ValueError as error:
            if scheme.least_scale > 0:  # the rank is too low
                raise
            found.append(None)
            refused.append(error)
    if len(refused) == len(weights):
        raise refused[0]
    return found


def _at_rank(candidate: Selected, scheme: Scheme, rank: int) -> Choice:
    if isinstance(candidate, AttentionCandidate):
        full = candidate.unit.head_size
        if rank > full:
            raise ValueError(
                f"rank must be in 1..{full} for the heads of {candidate.name!r}, got {rank}; exclude= it, or shrink "
                "attention in a separate call: fz.factorize_attention(model, rank_scale=...)"
            )
        return rank
    with named(candidate.name):
        return scheme.at_rank(candidate.shape, rank)


def _warn_if_clipped(scheme: Scheme, budget: Budget, weights: list[Tied]) -> None:
    """Warn once if a rank or a rank scale is above what some layers allow."""
    scale = budget.value if budget.name == "rank_scale" else None
    rank = int(budget.value) if budget.name == "rank" else None
    shapes = {first.name: first.shape for first, *_ in weights if isinstance(first, LayerCandidate)}
    found = {name: text for name, shape in shapes.items() if (text := scheme.clipped(shape, scale, rank))}
    if found:
        name, text = next(iter(found.items()))
        warn(
            f"{budget} is above what {len(found)} of {len(shapes)} layers allow, such as {name!r} {text}; the plan "
            "shows the real ranks",
        )
