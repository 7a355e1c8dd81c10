"""Progress callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many; 0 if unknown


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress."""


def watched(items: Iterable[Item], progress: Progress, stage: str, total: int = 0) -> Iterator[Item]:
    """Yield ``items``, and report every thousandth; a ``total`` of 0 is not known."""
    for count, item in enumerate(items, start=1):
        if count % 1000 == 0:
            progress(stage, count, total)
        yield item
