"""Progress of decompositions, shown once they have taken two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

Progress = Callable[[int, int], object]  # layers done, of how many
PATIENCE = 2.0  # seconds; below this, a bar would only flicker


class Count:
    """Counts layers that are done, and reports them: to ``progress``, or where that is None to a bar by tqdm.

    The bar appears after two seconds, where somebody looks: in a terminal or a notebook, and tqdm is installed.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        if progress is None:
            progress = late(_Bar()) if _is_watched() else _nothing
        self.progress, self.total, self.done = progress, total, 0

    def add(self, layers: int) -> None:
        """Report that so many more layers are done."""
        self.done += layers
        self.progress(self.done, self.total)


def late(show: Progress, seconds: float = PATIENCE) -> Progress:
    """Return ``show`` without what it is told in the first seconds from now."""
    begun = time.monotonic()

    def after_a_while(done: int, total: int) -> None:
        if time.monotonic() - begun >= seconds:
            show(done, total)

    return after_a_while


class _Bar:
    """A bar by tqdm, which knows terminals and notebooks; gone when all is done."""

    bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self.bar is None:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            self.bar = tqdm(desc="decomposing", total=total, unit="layer", leave=False)
        self.bar.update(done - self.bar.n)
        if done == total:
            self.bar.close()


def _is_watched() -> bool:
    somebody = sys.stderr is not None and sys.stderr.isatty()
    return (somebody or "ipykernel" in sys.modules) and find_spec("tqdm") is not None


def _nothing(done: int, total: int) -> None:
    pass
