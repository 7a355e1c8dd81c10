"""Cells of the paper's tables beside our runs of their recipes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from factorized.experiments.recipes.find import paper_cells
from factorized.experiments.recipes.tables import Cell
from factorized.experiments.reproduce.runs import Run
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.variant import Variant

BAND = 2.0  # deviations of the paper within which a figure counts as reproduced
TRIALS = 3  # of the paper
Verdict = Literal["within", "off", "no deviation", "shortened", "changed", "not measured", "missing"]


@dataclass(frozen=True)
class Comparison:
    """A figure of the paper, and our runs of its recipe if there are any."""

    cell: Cell  # with a figure and a recipe
    variant: Variant | None

    @property
    def paper(self) -> Summary:
        """The paper's figure."""
        if self.cell.figure is None:
            raise ValueError(f"{self.cell.recipe} has no figure in the paper to compare with")
        return Summary(self.cell.figure, self.cell.deviation, TRIALS)

    @property
    def ours(self) -> Summary | None:
        """The same figure of our runs; None where there are none, or where they did not measure it."""
        found = [_figure(run, self.cell.metric) for run in (self.variant.runs if self.variant is not None else ())]
        known = [figure for figure in found if figure is not None]
        return Summary.of(known) if known else None

    @property
    def difference(self) -> float | None:
        """Our mean less the paper's."""
        return None if self.ours is None else round(self.ours.mean - self.paper.mean, 9)

    @property
    def in_deviations(self) -> float | None:
        """The difference in deviations of the paper."""
        if self.difference is None or not self.paper.deviation:
            return None
        return round(self.difference / self.paper.deviation, 9)  # 1.32 / 0.66 is 2

    @property
    def chance(self) -> float | None:
        """How probable a difference at least as large is where ours and the paper's runs differ by chance alone.

        None where the figure is not judged, as runs of another recipe differ by more.
        """
        if self.ours is None or self.in_deviations is None or not self.judged:
            return None
        return 1 - chance_within(abs(self.in_deviations), self.ours.n)

    @property
    def judged(self) -> bool:
        """Whether complete runs of the recipe are compared with a figure that has a deviation."""
        return self.verdict in ("within", "off")

    @property
    def verdict(self) -> Verdict:
        """Whether the paper's figure was reached; runs that are shorter or otherwise changed are not judged."""
        if self.variant is None:
            return "missing"
        if self.ours is None:
            return "not measured"
        if self.variant.changes:
            return "changed"
        if self.variant.shortened:
            return "shortened"
        if self.in_deviations is None:
            return "no deviation"
        return "within" if abs(self.in_deviations) <= BAND else "off"


def chance_within(deviations: float, n: int) -> float:
    """Return how probably the mean of ``n`` runs is at most that many of the paper's deviations away from its mean.

    All runs are taken as draws from one normal distribution. Its deviation is known from the paper's three trials
    alone, so the difference of the means over its own deviation follows Student's t with two degrees of freedom.
    """
    t = deviations / math.sqrt(1 / TRIALS + 1 / n)
    return t / math.sqrt(t * t + TRIALS - 1)  # the distribution function in closed form, which two degrees have


def compare(variants: Sequence[Variant]) -> list[Comparison]:
    """Return every figure of the paper's tables that one of the variants aims at, whether or not it was trained.

    Figures that the paper quotes from others are not among them, nor those that no recipe aims at.
    """
    by_name: dict[str, list[Variant]] = {}
    for variant in variants:
        by_name.setdefault(variant.name, []).append(variant)
    cells = [cell for cell in paper_cells() if cell.recipe is not None and cell.figure is not None]
    tables = {cell.table for cell in cells if cell.recipe in by_name}
    return [
        Comparison(cell, variant)
        for cell in cells
        if cell.table in tables
        for variant in by_name.get(cell.recipe or "", [None])
    ]


def _figure(run: Run, metric: str) -> float | None:
    if metric == "error":
        accuracy = run.figure("accuracy")
        return None if accuracy is None else round(100 - accuracy, 6)  # 6.16, and not 6.159999999999997
    return run.figure(metric.lower())
