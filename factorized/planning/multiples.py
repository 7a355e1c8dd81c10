"""Ranks that are multiples of a number, which matrix products on GPUs are faster with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from factorized.planning.ranks import Choice, Choices, Item

WIDE = 512  # the longer side from which on a matrix's rank is rounded unasked
# Multiples that are chosen, and the least rank for each, so that layers stay near the common scale. A multiple of 8 is
# what counts: at rank 500, an H200 takes 2.5 times as long as at 512 (benchmarks/multiples.py). Larger ones add little.
CHOSEN = {64: 512, 32: 256, 16: 128, 8: 16}
OF_BUDGET = 0.01  # the cheapest step costs at most this share of the budget: what rounding can leave unspent


def chosen_multiples(items: Sequence[Item], exact: Choices, budget: int) -> list[int]:
    """Return the multiple to round every layer's rank to, a power of two, given the exact choices; 1 for none."""
    for largest in CHOSEN:
        multiples = [_multiple(item, choice, largest) for item, choice in zip(items, exact, strict=True)]
        rounded = [(i, choice, m) for i, choice, m in zip(items, exact, multiples, strict=True) if m > 1]
        if min((m * _step(i, choice) for i, choice, m in rounded), default=0) <= OF_BUDGET * budget:
            return multiples
    return [1] * len(items)


def _multiple(item: Item, choice: Choice | None, largest: int) -> int:
    rank = item.height(choice) if item.wide else 0
    return next((multiple for multiple, least in CHOSEN.items() if multiple <= largest and rank >= least), 1)


def _step(item: Item, choice: Choice) -> int:
    higher = item.higher(choice)[0]
    return item.cost(higher) - item.cost(choice)


def in_multiples(item: Item, multiple: int) -> Item:
    """Return the item with ranks that are multiples, by which a budget is then spent.

    A layer that only ranks below the first multiple make smaller keeps all of its ranks.
    """
    with_rank = item.with_rank
    if with_rank is None or multiple == 1:
        return item
    first = -(-item.height(item.lowest) // multiple) * multiple
    if item.settle(with_rank(first)) is None:
        return item

    def at_scale(scale: float) -> Choice:
        return with_rank(max(first, item.height(item.at_scale(scale)) // multiple * multiple))

    return replace(
        item,
        at_scale=at_scale,
        higher=lambda choice: [with_rank(item.height(choice) + multiple)],
        lower=lambda choice: [with_rank(item.height(choice) - multiple)] if item.height(choice) > first else [],
    )


def to_multiple(item: Item, choice: Choice, multiple: int, divide: Callable[[float], int] = round) -> Choice:
    """Return a choice with its rank rounded to a multiple, by ``divide`` to the nearest unless it is ``math.ceil``."""
    rounded = in_multiples(item, multiple)
    if rounded is item or item.with_rank is None:
        return choice
    return item.with_rank(max(rounded.height(rounded.lowest), divide(item.height(choice) / multiple) * multiple))
