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
    """Counts finished layers and reports them: to ``progress`` or, if that is None, to a tqdm bar.

    The bar appears after two seconds in a terminal or a notebook, if tqdm is installed.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        if progress is None:
            progress = late(_Bar()) if _is_watched() else _nothing
        self.progress, self.total, self.done = progress, total, 0

    def add(self, layers: int) -> None:
        """Report that this many more layers are done."""
        self.done += layers
        self.progress(self.done, self.total)


def late(show: Progress) -> Progress:
    """Return ``show``, ignoring calls in the first two seconds from now."""
    begun = time.monotonic()

    def after_a_while(done: int, total: int) -> None:
        if time.monotonic() - begun >= PATIENCE:
            show(done, total)

    return after_a_while


class _Bar:
    """A tqdm bar for terminals and notebooks, which disappears when all is done."""

    bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self.bar is None:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it ships no types

            self.bar = tqdm(desc="decomposing", total=total, unit="layer", leave=False)
        self.bar.update(done - self.bar.n)
        if done == total:
            self.bar.close()


def _is_watched() -> bool:
    in_terminal = sys.stderr is not None and sys.stderr.isatty()
    return (in_terminal or "ipykernel" in sys.modules) and find_spec("tqdm") is not None


def _nothing(done: int, total: int) -> None:
    pass
