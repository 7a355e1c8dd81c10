"""Spending a budget on ranks. Costs are abstract: parameters or multiply-accumulates."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

Choice = Any  # a format, or the rank of an attention head
Choices = list[Choice | None]  # None: the layer stays dense
ENOUGH_NEAR = 3000  # ranks of one tensor to choose from, where others than the common scale's are needed
Step = tuple[int, int, Choice | None]  # extra cost, of which layer, its new choice


@dataclass(frozen=True)
class Item:
    """One layer to spend the budget on, and what it may become."""

    cost: Callable[[Choice | None], int]  # of a choice, growing with its ranks; of the dense layer for None
    at_scale: Callable[[float], Choice]  # the scheme's choice at a rank scale, growing with it
    reference: int  # what the scale multiplies, before rounding
    may_stay_dense: bool  # a choice that costs more than the dense layer is no use, unless overcomplete
    higher: Callable[[Choice], Sequence[Choice]]  # the next choices up
    lower: Callable[[Choice], Sequence[Choice]]  # and down
    ranks: Callable[[Choice], tuple[int, ...]]  # of a choice
    coarse: bool = False  # a step of its ranks may cost much, so that it takes part in exchanges
    with_rank: Callable[[int], Choice] | None = None  # the choice of one rank; None where a choice has several
    wide: bool = False  # a matrix so wide that its rank may be rounded unasked

    @property
    def lowest(self) -> Choice:
        """The choice of the lowest rank."""
        return self.at_scale(0.0)

    def height(self, choice: Choice | None) -> int:
        """Return all ranks of a choice together."""
        return 0 if choice is None else sum(self.ranks(choice))

    def is_highest(self, rank: Choice | None) -> bool:
        """Return whether there is no higher rank, though the layer is not dense."""
        return rank is not None and not self.higher(rank)

    def settle(self, rank: Choice) -> Choice | None:
        """Return ``rank``, or None where the dense layer costs no more."""
        return None if self.may_stay_dense and self.cost(rank) >= self.cost(None) else rank

    def next_step(self, rank: Choice | None, budget: float = inf) -> tuple[Choice | None, int] | None:
        """Return the next rank up, or dense where that is no dearer, with its extra cost; None at the end.

        Of a tensor each of several ranks can be the next: the dearest within ``budget`` is.
        """
        if rank is None:
            return None
        steps = [(self.settle(higher), rank) for higher in self.higher(rank)]
        dearer = [(higher, self.cost(higher) - self.cost(lower)) for higher, lower in steps]
        return max((step for step in dearer if step[1] <= budget), key=lambda step: step[1], default=None)


def total_cost(items: Sequence[Item], ranks: Choices) -> int:
    """Return what all layers cost together."""
    return sum(item.cost(rank) for item, rank in zip(items, ranks, strict=True))


def lowest_cost(items: Sequence[Item]) -> int:
    """Return the least that all layers can cost: rank 1 everywhere that this helps."""
    return total_cost(items, [item.settle(item.lowest) for item in items])


def scaled_ranks(items: Sequence[Item], scale: float) -> Choices:
    """Return every layer's rank at one rank scale: the paper's rule."""
    return [item.settle(item.at_scale(scale)) for item in items]


def spend_uniformly(items: Sequence[Item], budget: int) -> Choices:
    """Return the ranks of the largest rank scale within ``budget``, then spend what is left one rank at a time.

    What the common scale leaves is less than one rank step of all layers together; it goes to the layers whose rank
    the rounding had cut most.
    """
    alike = Counter(items)  # a model has many equal layers: each is costed once

    def cost_at(scale: float) -> int:
        return sum(count * item.cost(item.settle(item.at_scale(scale))) for item, count in alike.items())

    low, high = 0.0, 1.0
    while cost_at(high) <= budget and high < 2**20:
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        if cost_at(middle) <= budget:
            low = middle
        else:
            high = middle
    ranks = scaled_ranks(items, low)
    cut = [low * item.reference - item.height(rank) for item, rank in zip(items, ranks, strict=True)]
    order = sorted(range(len(items)), key=lambda index: -cut[index])
    return _exchange(items, _spend_remainder(items, ranks, budget, order), budget, low)


def spend_by_spectrum(items: Sequence[Item], energies: Sequence[Sequence[float]], budget: int) -> Choices:
    """Return ranks that buy singular directions, the most energy per cost first, until ``budget`` is spent.

    ``energies[i][k]`` is the squared k-th singular value of layer i. Taking the best next step again and again is
    nearly the best; where whole steps mislead it so that the uniform ranks lose less energy, those are returned.
    """
    ranks: Choices = [item.settle(item.lowest) for item in items]
    spent = total_cost(items, ranks)
    heap: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        step = items[index].next_step(ranks[index])
        if step is None:
            return
        rank, cost = step
        first, height = items[index].height(ranks[index]), items[index].height(rank)
        gain = sum(energies[index][first:] if rank is None else energies[index][first:height])
        heapq.heappush(heap, (-gain / max(cost, 1), index))

    for index in range(len(items)):
        offer(index)
    while heap:
        _, index = heapq.heappop(heap)
        step = items[index].next_step(ranks[index])
        if step is not None and spent + step[1] <= budget:
            ranks[index], spent = step[0], spent + step[1]
            offer(index)

    def lost(found: Choices) -> float:
        kept = zip(items, energies, found, strict=True)
        return sum(sum(energy[item.height(rank) :]) for item, energy, rank in kept if rank is not None)

    return min(ranks, spend_uniformly(items, budget), key=lost)


def _spend_remainder(items: Sequence[Item], ranks: Choices, budget: int, order: Sequence[int]) -> Choices:
    left = budget - total_cost(items, ranks)
    progress = True
    while progress:
        progress = False
        for index in order:
            step = items[index].next_step(ranks[index], left)
            if step is not None:
                ranks[index], left, progress = step[0], left - step[1], True
    return ranks


def _exchange(items: Sequence[Item], ranks: Choices, budget: int, scale: float) -> Choices:
    """Give tensors other ranks near the common scale, one or two of them at a time, until 1 % of the budget is left.

    A step of one rank of a tensor can cost more than that, while several up and down together do not. The nearest
    ranks come first, so that no tensor is further from the common scale than it takes.
    """
    ranks, left = list(ranks), budget - total_cost(items, ranks)
    rings = [_rings(item, scale) if item.coarse else iter(()) for item in items]
    choices: list[dict[int, Choice | None]] = [{} for _ in items]  # ranks by their cost
    while left > budget // 100:
        grown = [next(ring, {}) for ring in rings]
        if not any(grown):
            break
        choices = [ring | choice for ring, choice in zip(grown, choices, strict=True)]
        while left > budget // 100:
            steps: list[Step] = [(0, -1, None), (0, -2, None)]  # two that change nothing, beside one of a layer
            for index, (item, rank) in enumerate(zip(items, ranks, strict=True)):
                now = item.cost(rank)
                steps += [(cost - now, index, other) for cost, other in choices[index].items()]
            steps.sort(key=lambda step: step[:2])
            best = max(_best_pairs(steps, left), key=lambda pair: pair[0][0] + pair[1][0])
            gain = best[0][0] + best[1][0]
            if gain <= 0:
                break
            for _, index, rank in best:
                if index >= 0:
                    ranks[index] = rank
            left -= gain
    return ranks


def _rings(item: Item, scale: float) -> Iterator[dict[int, Choice | None]]:
    """Yield ranks of a tensor by their cost, ring after ring around those at a scale, of one cost the nearest.

    Each rank is within a third of that at the scale, or two steps.
    """
    start = item.at_scale(scale)
    bounds = [(here - max(2, here // 3), here + max(2, here // 3)) for here in item.ranks(start)]
    ring, seen = {item.cost(start): start}, set[int]()
    while ring and len(seen) < ENOUGH_NEAR:
        yield {item.cost(settled): settled for settled in map(item.settle, ring.values())}
        seen |= ring.keys()
        around = {other for rank in ring.values() for other in (*item.higher(rank), *item.lower(rank))}
        near = [other for other in around if _within(item.ranks(other), bounds)]
        ring = {cost: other for other in sorted(near, key=item.ranks) if (cost := item.cost(other)) not in seen}


def _within(ranks: Sequence[int], bounds: Sequence[tuple[int, int]]) -> bool:
    return all(low <= rank <= high for rank, (low, high) in zip(ranks, bounds, strict=True))


def _best_pairs(steps: Sequence[Step], left: int) -> Iterator[tuple[Step, Step]]:
    """Yield, for each of some steps in the order of their cost, the dearest of another layer that ``left`` allows."""
    costs = [step[0] for step in steps]
    for one in steps:
        place = bisect_right(costs, left - one[0]) - 1
        while place >= 0 and steps[place][1] == one[1]:
            place -= 1
        if place >= 0:
            yield one, steps[place]
