"""The charts of a report: ours against the paper, learning curves, norms of products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from factorized.experiments.reproduce.chart import (
    SIZE,
    SMALL,
    Dot,
    Line,
    line_chart,
    scatter_chart,
    strip_chart,
    uses_log,
)
from factorized.experiments.reproduce.compare import BAND, Comparison
from factorized.experiments.reproduce.variant import Variant

COLOURS = 8  # of the page's style sheet; then the same ones again, with broken lines
# columns of a history, their titles, and whether a logarithmic axis may show them
SCORES = {
    "test_accuracy": ("Test accuracy, %", False),
    "f1": ("F1 on the validation text", False),
    "exact_match": ("Exact match on the validation text", False),
    "perplexity": ("Perplexity of the validation text", True),
    "validation_loss": ("Validation loss", True),
    "loss": ("Training loss", True),
}


@dataclass(frozen=True)
class Panel:
    """A chart with its title and a note."""

    title: str
    svg: str
    note: str = ""
    end: str = ""  # the same chart of the second half of the runs


@dataclass(frozen=True)
class Series:
    """A line of the legend: what it is, and how it is drawn."""

    label: str
    style: str


@dataclass(frozen=True)
class Curves:
    """The curves of variants that can be compared: the same network on the same data."""

    title: str
    series: Sequence[Series]
    panels: Sequence[Panel]


def paper_panels(comparisons: Sequence[Comparison]) -> list[Panel]:
    """Return ours against the paper with the ranges of two deviations, and the differences in deviations."""
    judged = [found for found in comparisons if found.judged]
    if not judged:
        return []
    dots, stems = [], []
    for place, found in enumerate(sorted(judged, key=lambda found: found.paper.mean)):
        ours, paper = found.ours, found.paper
        if ours is None or found.in_deviations is None or paper.deviation is None:
            continue
        flip = found.cell.metric == "error"  # drawn as accuracies, so that one chart holds all tables
        x, y = (100 - paper.mean, 100 - ours.mean) if flip else (paper.mean, ours.mean)
        told = (
            f"{found.cell.recipe}: ours {ours} (n = {ours.n}), the paper {paper}: {found.in_deviations:+.2f} deviations"
        )
        dots.append(Dot(told, x, y, found.verdict, x, BAND * paper.deviation))
        stems.append(Dot(told, place, -found.in_deviations if flip else found.in_deviations, found.verdict))
    note = f"A vertical bar is the range of {BAND:g} of the paper's deviations around its figure."
    return [
        Panel("Ours against the paper", scatter_chart(dots, "Ours against the paper", "the paper, %", "ours, %"), note),
        Panel(
            "Differences in deviations",
            strip_chart(stems, BAND, "Differences in the paper's deviations", "deviations, ours less the paper's"),
            f"One stem for each cell, in the order of the paper's figures; the band is ±{BAND:g}. Up is better.",
        ),
    ]


def curve_groups(variants: Sequence[Variant]) -> list[Curves]:
    """Return learning curves, grouped by data and network; every axis holds every epoch."""
    groups: dict[tuple[str, str, str], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.model, variant.data, variant.runs[0].by), []).append(variant)
    found = []
    for (model, data, by), members in groups.items():
        series = [Series(label, _style(number)) for number, label in enumerate(_short_titles(members))]
        panels = []
        for column, (title, log) in SCORES.items():
            drawn = zip(members, series, strict=True)
            lines = [line for v, one in drawn if (line := v.curve(column, one.label, one.style)) is not None]
            if lines:
                panels.append(_curve_panel(lines, title, f"{title} of {model} on {data}", by, log=log))
        if panels:
            found.append(Curves(f"{model} on {data}", series, panels))
    return found


def _curve_panel(lines: Sequence[Line], title: str, told: str, by: str, *, log: bool) -> Panel:
    half = max(line.points[-1][0] for line in lines) / 2
    later = [part for line in lines if len((part := line.since(half)).points) > 1]
    note = "Logarithmic axis." if log and uses_log(lines) else ""
    end = line_chart(later, f"{told}, second half", by, SIZE, log=log) if later else ""
    return Panel(title, line_chart(lines, told, by, SIZE, log=log), note, end)


def product_panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return the nuclear norm and its bound over training, for each variant that recorded them."""
    panels = []
    for variant in variants:
        norm = variant.curve("nuclear", "nuclear norm", "nuclear")
        bound = variant.curve("nuclear_bound", "bound", "bound")
        if norm is None or bound is None:
            continue
        end = norm.points[-1][1]
        told = f"at the end, the bound is {bound.points[-1][1] / end:.2f} times the norm" if end else "the norm is 0"
        svg = line_chart([bound, norm], f"Nuclear norm and its bound, {variant.title}", variant.runs[0].by, SMALL)
        panels.append(Panel(variant.title, svg, told))
    return panels


def _short_titles(variants: Sequence[Variant]) -> list[str]:
    """Return the titles without the folder that all of them are in."""
    folders = {variant.label.rpartition("/")[0] for variant in variants}
    start = f"{folders.pop()}/" if len(folders) == 1 else ""
    return [variant.title.removeprefix(start) for variant in variants]


def _style(number: int) -> str:
    broken = f" broken{number // COLOURS % 3}" if number >= COLOURS else ""
    return f"s{number % COLOURS}{broken}"
