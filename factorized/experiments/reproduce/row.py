"""A cell of a table beside our runs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factorized.experiments.recipes.shorten import shortening
from factorized.experiments.recipes.tables import Cell
from factorized.experiments.reproduce.compare import Comparison
from factorized.experiments.reproduce.planned import PlannedRun
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.variant import Variant


@dataclass(frozen=True)
class Row:
    """The runs of a recipe, one for each seed."""

    runs: Sequence[PlannedRun]

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return self.runs[0].name

    @property
    def shortened(self) -> str:
        """How much of its training the runs do, such as "3 of 200 epochs"; nothing for all of it."""
        return shortening(self.runs[0].recipe.to_dict())

    @property
    def comparison(self) -> Comparison | None:
        """Our runs beside the figure that the recipe aims at; None where it aims at none."""
        aim = self.runs[0].recipe.paper
        if aim is None or (aim.accuracy is None and aim.f1 is None):
            return None
        metric, figure = ("accuracy", aim.accuracy) if aim.accuracy is not None else ("f1", aim.f1)
        cell = Cell(aim.table, "", metric, "", "", figure, aim.deviation, None, self.name)
        finished = [run.finished for run in self.runs if run.finished is not None]
        return Comparison(cell, Variant(finished, self.name, shortened=self.shortened) if finished else None)

    @property
    def paper(self) -> Summary | None:
        """The paper's figure."""
        return None if self.comparison is None else self.comparison.paper

    @property
    def ours(self) -> Summary | None:
        """Our figure, of the seeds that are finished."""
        scores = [run.finished.score for run in self.runs if run.finished is not None]
        return Summary.of(scores) if scores else None

    @property
    def off(self) -> float | None:
        """The difference from the paper in its deviations; None for shortened runs, which do not aim at its figure."""
        found = self.comparison
        return None if found is None or found.verdict == "shortened" else found.in_deviations

    @property
    def problem(self) -> str | None:
        """Why some of its runs cannot be done here."""
        return next((run.problem for run in self.runs if run.problem is not None), None)


def shown(result: Mapping[str, Any]) -> str:
    """Return the figure of a result in words, marked where it is of a shortened run."""
    score = result.get("score")
    figure = f"{result['accuracy']:.2f} %" if score is None else f"{score} {result['scores'][score]:.2f}"
    shortened = shortening(result["recipe"])
    return f"{figure} (shortened: {shortened})" if shortened else figure
