"""Spending a budget on integer ranks. Costs are abstract: parameters or multiply-accumulates."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from factorized.maths.folding import Rank

Ranks = list[Rank | None]  # None: the layer stays dense
ENOUGH_NEAR = 3000  # ranks of one tensor to choose from, where others than the common scale's are needed
Step = tuple[int, int, Rank | None]  # extra cost, of which layer, its new rank


@dataclass(frozen=True)
class Item:
    """One layer to spend the budget on."""

    cost: Callable[[Rank | None], int]  # of a rank, growing with it; of the dense layer for None
    rank_at: Callable[[float], Rank]  # the scheme's rank at a rank scale, growing with it
    reference: int  # what the scale multiplies, before rounding
    may_stay_dense: bool  # a rank that costs more than the dense layer is no use, unless overcomplete
    higher: Callable[[Rank], Sequence[Rank]] = lambda rank: [rank + 1]  # type: ignore[operator]
    lower: Callable[[Rank], Sequence[Rank]] = lambda rank: [rank - 1] if rank != 1 else []  # type: ignore[operator]

    @property
    def lowest(self) -> Rank:
        """The lowest rank there is."""
        return self.rank_at(0.0)

    def is_highest(self, rank: Rank | None) -> bool:
        """Return whether there is no higher rank, though the layer is not dense."""
        return rank is not None and not self.higher(rank)

    def settle(self, rank: Rank) -> Rank | None:
        """Return ``rank``, or None where the dense layer costs no more."""
        return None if self.may_stay_dense and self.cost(rank) >= self.cost(None) else rank

    def next_step(self, rank: Rank | None, budget: float = inf) -> tuple[Rank | None, int] | None:
        """Return the next rank up, or dense where that is no dearer, with its extra cost; None at the end.

        Of a tensor each of several ranks can be the next: the dearest within ``budget`` is.
        """
        if rank is None:
            return None
        steps = [(self.settle(higher), rank) for higher in self.higher(rank)]
        dearer = [(higher, self.cost(higher) - self.cost(lower)) for higher, lower in steps]
        return max((step for step in dearer if step[1] <= budget), key=lambda step: step[1], default=None)


def total_cost(items: Sequence[Item], ranks: Ranks) -> int:
    """Return what all layers cost together."""
    return sum(item.cost(rank) for item, rank in zip(items, ranks, strict=True))


def lowest_cost(items: Sequence[Item]) -> int:
    """Return the least that all layers can cost: rank 1 everywhere that this helps."""
    return total_cost(items, [item.settle(item.lowest) for item in items])


def scaled_ranks(items: Sequence[Item], scale: float) -> Ranks:
    """Return every layer's rank at one rank scale: the paper's rule."""
    return [item.settle(item.rank_at(scale)) for item in items]


def spend_uniformly(items: Sequence[Item], budget: int) -> Ranks:
    """Return the ranks of the largest rank scale within ``budget``, then spend what is left one rank at a time.

    What the common scale leaves is less than one rank step of all layers together; it goes to the layers whose rank
    the rounding had cut most.
    """
    low, high = 0.0, 1.0
    while total_cost(items, scaled_ranks(items, high)) <= budget and high < 2**20:
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        if total_cost(items, scaled_ranks(items, middle)) <= budget:
            low = middle
        else:
            high = middle
    ranks = scaled_ranks(items, low)
    cut = [low * item.reference - _height(rank) for item, rank in zip(items, ranks, strict=True)]
    order = sorted(range(len(items)), key=lambda index: -cut[index])
    return _exchange(items, _spend_remainder(items, ranks, budget, order), budget, low)


def spend_by_spectrum(items: Sequence[Item], energies: Sequence[Sequence[float]], budget: int) -> Ranks:
    """Return ranks that buy singular directions, the most energy per cost first, until ``budget`` is spent.

    ``energies[i][k]`` is the squared k-th singular value of layer i. Taking the best next step again and again is
    nearly the best; where whole steps mislead it so that the uniform ranks lose less energy, those are returned.
    """
    ranks: Ranks = [item.settle(item.lowest) for item in items]
    spent = total_cost(items, ranks)
    heap: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        step = items[index].next_step(ranks[index])
        if step is None:
            return
        rank, cost = step
        first = _height(ranks[index])
        gain = sum(energies[index][first:] if rank is None else energies[index][first : _height(rank)])
        heapq.heappush(heap, (-gain / max(cost, 1), index))

    for index in range(len(items)):
        offer(index)
    while heap:
        _, index = heapq.heappop(heap)
        step = items[index].next_step(ranks[index])
        if step is not None and spent + step[1] <= budget:
            ranks[index], spent = step[0], spent + step[1]
            offer(index)

    def lost(found: Ranks) -> float:
        return sum(
            sum(energy[_height(rank) :]) for energy, rank in zip(energies, found, strict=True) if rank is not None
        )

    return min(ranks, spend_uniformly(items, budget), key=lost)


def _height(rank: Rank | None) -> int:
    return sum(rank) if isinstance(rank, tuple) else rank or 0


def _spend_remainder(items: Sequence[Item], ranks: Ranks, budget: int, order: Sequence[int]) -> Ranks:
    left = budget - total_cost(items, ranks)
    progress = True
    while progress:
        progress = False
        for index in order:
            step = items[index].next_step(ranks[index], left)
            if step is not None:
                ranks[index], left, progress = step[0], left - step[1], True
    return ranks


def _exchange(items: Sequence[Item], ranks: Ranks, budget: int, scale: float) -> Ranks:
    """Give tensors other ranks near the common scale, one or two of them at a time, until 1 % of the budget is left.

    A step of one rank of a tensor can cost more than that, while several up and down together do not. The nearest
    ranks come first, so that no tensor is further from the common scale than it takes.
    """
    ranks, left = list(ranks), budget - total_cost(items, ranks)
    rings = [_rings(item, scale) if isinstance(item.lowest, tuple) else iter(()) for item in items]
    choices: list[dict[int, Rank | None]] = [{} for _ in items]  # ranks by their cost
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


def _rings(item: Item, scale: float) -> Iterator[dict[int, Rank | None]]:
    """Yield ranks of a tensor by their cost, ring after ring around those at a scale, of one cost the nearest.

    Each rank is within a third of that at the scale, or two steps.
    """
    start = item.rank_at(scale)
    assert isinstance(start, tuple)
    bounds = [(here - max(2, here // 3), here + max(2, here // 3)) for here in start]
    ring, seen = {item.cost(start): start}, set[int]()
    while ring and len(seen) < ENOUGH_NEAR:
        yield {item.cost(settled): settled for settled in map(item.settle, ring.values())}
        seen |= ring.keys()
        around = {other for rank in ring.values() for other in (*item.higher(rank), *item.lower(rank))}
        near = [other for other in around if isinstance(other, tuple) and _within(other, bounds)]
        ring = {cost: other for other in sorted(near) if (cost := item.cost(other)) not in seen}


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
