"""A cell of a table beside our runs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factorized.experiments.recipes.shorten import shortening
from factorized.experiments.reproduce.planned import PlannedRun
from factorized.experiments.reproduce.summary import Summary


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
    def paper(self) -> Summary | None:
        """The paper's figure, mean of three trials."""
        paper = self.runs[0].recipe.paper
        figure = None if paper is None else paper.accuracy if paper.accuracy is not None else paper.f1
        return None if paper is None or figure is None else Summary(figure, paper.deviation, 3)

    @property
    def ours(self) -> Summary | None:
        """Our figure, of the seeds that are finished."""
        scores = [run.finished.score for run in self.runs if run.finished is not None]
        return Summary.of(scores) if scores else None

    @property
    def metric(self) -> str:
        """What the runs are judged by; nothing before the first is finished."""
        return next((run.finished.metric for run in self.runs if run.finished is not None), "")

    @property
    def off(self) -> float | None:
        """The difference from the paper in its deviations; None for shortened runs, which do not aim at its figure."""
        paper, ours = self.paper, self.ours
        if paper is None or ours is None or not paper.deviation or self.shortened:
            return None
        return (ours.mean - paper.mean) / paper.deviation

    @property
    def to_do(self) -> list[PlannedRun]:
        """The runs that are missing and can be done."""
        return [run for run in self.runs if run.is_to_do]

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
