"""Progress callbacks."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress."""
