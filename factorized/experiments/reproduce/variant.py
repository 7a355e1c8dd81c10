"""One row of a comparison: the runs of a recipe, and the curves they drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from factorized.experiments.reproduce.chart import Line
from factorized.experiments.reproduce.summary import Summary

Result = dict[str, Any]  # what a run's result.json holds


@dataclass(frozen=True, eq=False)
class Variant:
    """A recipe that was trained with some seeds."""

    label: str
    results: Sequence[Result]
    deployed: int  # parameters of the network without factors that cost more than their product
    marks: tuple[str, ...] = ()  # "best", and of what

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return str(self.results[0]["recipe"]["name"])

    @property
    def scheme(self) -> str:
        """How its weights are factorized; "none" for a dense network."""
        return str(self.results[0]["recipe"]["factorize"]["scheme"])

    @property
    def parameters(self) -> int:
        """Parameters in training."""
        return int(self.results[0]["parameters"])

    @property
    def accuracy(self) -> Summary:
        """Test accuracy in percent."""
        return Summary.of([result["accuracy"] for result in self.results])

    @property
    def seconds(self) -> Summary:
        """Seconds that a run took."""
        return Summary.of([result["seconds"] for result in self.results])

    @property
    def paper(self) -> dict[str, float | None] | None:
        """The figure of the paper, where the recipe has one."""
        return self.results[0]["recipe"]["paper"]

    @property
    def style(self) -> str:
        """The classes of its curves: the colour tells the decay, a broken line factors that were not drawn by SI."""
        fields = self.results[0]["recipe"]
        if self.scheme == "none":
            return "dense"
        if self.scheme == "overcomplete":
            return "overcomplete" if fields["decay"]["kind"] == "frobenius" else "overcomplete broken"
        colour = fields["decay"]["kind"]
        return colour if fields["factorize"]["init"] in ("spectral", None) else f"{colour} broken"

    def curve(self, column: str, label: str | None = None, style: str | None = None) -> Line | None:
        """Return a column of the metrics over epochs, averaged over the seeds; None where no run has it."""
        rows = [
            {row["epoch"]: float(row[column]) for row in result["history"] if column in row} for result in self.results
        ]
        epochs = sorted(set.intersection(*(set(row) for row in rows)))
        if not epochs:
            return None
        values = {epoch: [row[epoch] for row in rows] for epoch in epochs}
        return Line(
            label or self.label,
            [(epoch, sum(found) / len(found)) for epoch, found in values.items()],
            style or self.style,
            [(epoch, min(found), max(found)) for epoch, found in values.items()] if len(rows) > 1 else (),
        )


def mark_best(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants with the most accurate one marked, and the most accurate of the low-rank ones."""
    best = max(variants, key=lambda variant: variant.accuracy.mean)
    low_rank = [variant for variant in variants if variant.scheme == "low_rank"]
    small = max(low_rank, key=lambda variant: variant.accuracy.mean, default=None)
    return [
        Variant(
            variant.label,
            variant.results,
            variant.deployed,
            (*(("best",) if variant is best else ()), *(("best low-rank",) if variant is small else ())),
        )
        for variant in variants
    ]
