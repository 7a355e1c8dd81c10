"""Several runs as one figure: mean, standard deviation and how many."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """A figure measured ``n`` times."""

    mean: float
    deviation: float | None  # of the sample; None for one measurement
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        """Return the summary of at least one value."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Summary(statistics.fmean(values), deviation, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.deviation:.2f}" if self.deviation is not None else "")
