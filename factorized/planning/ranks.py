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
ENOUGH_NEAR = 3000  # most ranks of one tensor to try around those of the common scale
Step = tuple[int, int, Choice | None]  # extra cost, of which layer, its new choice


@dataclass(frozen=True)
class Item:
    """One layer to spend the budget on, and its possible formats."""

    cost: Callable[[Choice | None], int]  # of a choice, increasing with its ranks; None is the dense layer
    at_scale: Callable[[float], Choice]  # the scheme's choice at a rank scale, increasing with it
    reference: int  # what the scale multiplies, before rounding
    may_stay_dense: bool  # True unless overcomplete: a choice that costs more than the dense layer is useless
    higher: Callable[[Choice], Sequence[Choice]]  # the next choices up
    lower: Callable[[Choice], Sequence[Choice]]  # and down
    ranks: Callable[[Choice], tuple[int, ...]]  # of a choice
    coarse: bool = False  # one rank step may cost much, so it takes part in exchanges
    with_rank: Callable[[int], Choice] | None = None  # the choice of one rank; None where a choice has several
    wide: bool = False  # a matrix so wide that its rank may be rounded by default

    @property
    def lowest(self) -> Choice:
        """The choice of the lowest rank."""
        return self.at_scale(0.0)

    def height(self, choice: Choice | None) -> int:
        """Return the sum of a choice's ranks."""
        return 0 if choice is None else sum(self.ranks(choice))

    def is_highest(self, choice: Choice | None) -> bool:
        """Return whether there is no higher choice, though the layer is not dense."""
        return choice is not None and not self.higher(choice)

    def settle(self, choice: Choice) -> Choice | None:
        """Return ``choice``, or None where the dense layer costs no more."""
        return None if self.may_stay_dense and self.cost(choice) >= self.cost(None) else choice

    def next_step(self, choice: Choice | None, budget: float = inf) -> tuple[Choice | None, int] | None:
        """Return the next choice up, or dense if that costs no more, with its extra cost; None at the end.

        A tensor has several next choices: the most expensive within ``budget`` is taken.
        """
        if choice is None:
            return None
        settled = [self.settle(higher) for higher in self.higher(choice)]
        steps = [(higher, self.cost(higher) - self.cost(choice)) for higher in settled]
        return max((step for step in steps if step[1] <= budget), key=lambda step: step[1], default=None)


def total_cost(items: Sequence[Item], choices: Choices) -> int:
    """Return what all layers cost together."""
    return sum(item.cost(choice) for item, choice in zip(items, choices, strict=True))


def lowest_cost(items: Sequence[Item]) -> int:
    """Return the least that all layers can cost: rank 1 everywhere that this helps."""
    return total_cost(items, [item.settle(item.lowest) for item in items])


def spend_uniformly(items: Sequence[Item], budget: int) -> Choices:
    """Return the choices at the largest rank scale within ``budget``, and spend the remainder one rank at a time.

    The remainder is less than one rank step of all layers together. It goes to the layers whose rank was rounded down
    most.
    """
    alike = Counter(items)  # a model has many equal layers: the cost of each is computed once

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
    choices = [item.settle(item.at_scale(low)) for item in items]  # the paper's rule
    cut = [low * item.reference - item.height(choice) for item, choice in zip(items, choices, strict=True)]
    order = sorted(range(len(items)), key=lambda index: -cut[index])
    return _exchange(items, _spend_remainder(items, choices, budget, order), budget, low)


def spend_by_spectrum(items: Sequence[Item], energies: Sequence[Sequence[float]], budget: int) -> Choices:
    """Return choices that buy singular directions, the most energy per cost first, until ``budget`` is spent.

    ``energies[i][k]`` is the squared k-th singular value of layer i. Always taking the best next step is nearly
    optimal; where the uniform choices lose less energy, those are returned.
    """
    choices: Choices = [item.settle(item.lowest) for item in items]
    spent = total_cost(items, choices)
    heap: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        step = items[index].next_step(choices[index])
        if step is None:
            return
        higher, cost = step
        first, height = items[index].height(choices[index]), items[index].height(higher)
        gain = sum(energies[index][first:] if higher is None else energies[index][first:height])
        heapq.heappush(heap, (-gain / max(cost, 1), index))

    for index in range(len(items)):
        offer(index)
    while heap:
        _, index = heapq.heappop(heap)
        step = items[index].next_step(choices[index])
        if step is not None and spent + step[1] <= budget:
            choices[index], spent = step[0], spent + step[1]
            offer(index)

    def lost(found: Choices) -> float:
        kept = zip(items, energies, found, strict=True)
        return sum(sum(energy[item.height(choice) :]) for item, energy, choice in kept if choice is not None)

    return min(choices, spend_uniformly(items, budget), key=lost)


def _spend_remainder(items: Sequence[Item], choices: Choices, budget: int, order: Sequence[int]) -> Choices:
    left = budget - total_cost(items, choices)
    progress = True
    while progress:
        progress = False
        for index in order:
            step = items[index].next_step(choices[index], left)
            if step is not None:
                choices[index], left, progress = step[0], left - step[1], True
    return choices


def _exchange(items: Sequence[Item], choices: Choices, budget: int, scale: float) -> Choices:
    """Give tensors other ranks near the common scale, one or two at a time, until at most 1 % of the budget is left.

    One rank step of a tensor can cost more than that, while steps up and down together do not. The nearest ranks come
    first, so that no tensor moves further from the common scale than necessary.
    """
    choices, left = list(choices), budget - total_cost(items, choices)
    rings = [_rings(item, scale) if item.coarse else iter(()) for item in items]
    near: list[dict[int, Choice | None]] = [{} for _ in items]  # choices by their cost
    while left > budget // 100:
        grown = [next(ring, {}) for ring in rings]
        if not any(grown):
            break
        near = [ring | nearer for ring, nearer in zip(grown, near, strict=True)]
        while left > budget // 100:
            steps: list[Step] = [(0, -1, None), (0, -2, None)]  # two that change nothing: a single step is a pair too
            for index, (item, choice) in enumerate(zip(items, choices, strict=True)):
                now = item.cost(choice)
                steps += [(cost - now, index, other) for cost, other in near[index].items()]
            steps.sort(key=lambda step: step[:2])
            best = max(_best_pairs(steps, left), key=lambda pair: pair[0][0] + pair[1][0])
            gain = best[0][0] + best[1][0]
            if gain <= 0:
                break
            for _, index, choice in best:
                if index >= 0:
                    choices[index] = choice
            left -= gain
    return choices


def _rings(item: Item, scale: float) -> Iterator[dict[int, Choice | None]]:
    """Yield choices for a tensor by their cost, in rings around that at a scale; the nearest wins among equal costs.

    Each rank is within a third, or two steps, of that at the scale.
    """
    start = item.at_scale(scale)
    bounds = [(here - max(2, here // 3), here + max(2, here // 3)) for here in item.ranks(start)]
    ring, seen = {item.cost(start): start}, set[int]()
    while ring and len(seen) < ENOUGH_NEAR:
        yield {item.cost(settled): settled for settled in map(item.settle, ring.values())}
        seen |= ring.keys()
        around = {other for choice in ring.values() for other in (*item.higher(choice), *item.lower(choice))}
        near = [other for other in around if _within(item.ranks(other), bounds)]
        ring = {cost: other for other in sorted(near, key=item.ranks) if (cost := item.cost(other)) not in seen}


def _within(ranks: Sequence[int], bounds: Sequence[tuple[int, int]]) -> bool:
    return all(low <= rank <= high for rank, (low, high) in zip(ranks, bounds, strict=True))


def _best_pairs(steps: Sequence[Step], left: int) -> Iterator[tuple[Step, Step]]:
    """Yield, for each step (sorted by cost), the most expensive step of another layer that ``left`` allows."""
    costs = [step[0] for step in steps]
    for one in steps:
        place = bisect_right(costs, left - one[0]) - 1
        while place >= 0 and steps[place][1] == one[1]:
            place -= 1
        if place >= 0:
            yield one, steps[place]
