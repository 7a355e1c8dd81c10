"""The figures of ``docs/text_results.md``: what they show, from the files under ``results/``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.drawing import Panel, Points, draw
from benchmarks.tables import ROOT
from benchmarks.text_runs import (
    DECODER,
    RESULTS,
    TATOEBA,
    TINY,
    Row,
    by_series,
    comparable,
    lowest,
    read_rows,
    rows_of,
)

FOLDER = ROOT / "docs" / "figures"
DECAYS = {"WD": "-wd", "FD-OV": "-fd-ov", "FD-OV+QK": "-fd-ov-qk"}


def translation_panels(results: Path) -> list[Panel]:
    """Return BLEU against the strength of the decay, and against the compression, as in figure 4 of the paper.

    Rows are compared that have the same changes, apart from the strength: those that most rows have.
    """
    every = rows_of("translation", TATOEBA, results)
    alike = comparable(every)

    def points(recipe: str, x: float | None = None, rows: Sequence[Row] = alike) -> Points:
        """Return BLEU of a recipe's rows at ``x``, or by their strength."""
        return [(x or row.strength or 0.0, mean(row.scores("bleu"))) for row in rows if row.name == recipe]

    dense = points(TATOEBA, 1.0)
    decays = {label: points(TATOEBA + way) for label, way in DECAYS.items()}
    other_scale = [row for row in every if row not in alike and row.others == ("factorize.init=default",)]
    ratios = {
        label: [*points(f"{TATOEBA}-0.25{way}", 0.25, rows), *points(f"{TATOEBA}-0.5{way}", 0.5, rows), *dense]
        for label, way, rows in (
            ("with SI", "-si", alike),
            ("without SI", "", alike),
            ("factors drawn by torch", "", other_scale),
        )
    }
    levels = {"no decay": dense[0][1]} if dense else {}
    return [
        Panel("strength of the decay", "BLEU", {k: v for k, v in decays.items() if v}, levels, "x"),
        Panel("compression", "BLEU", {k: v for k, v in ratios.items() if len(v) > len(dense)}),
    ]


def language_panels(results: Path) -> list[Panel]:
    """Return the learning curves of the decoders, each at its best strength: a panel for each ratio, dense in both."""
    rows = [lowest(some, "perplexity") for some in by_series(rows_of("language", DECODER, results)).values()]
    panels = []
    for ratio in ("0.5", "0.25"):
        some = [row for row in rows if row.name == DECODER or f"-{ratio}" in row.name]
        curves = {" ".join(row.series): row.curve("perplexity") for row in some}
        lines = {label: list(curve.points) for label, curve in curves.items() if curve is not None}
        panels.append(Panel("update", "perplexity per word, held-out text", lines, log="y"))
    return panels


def strength_panels(results: Path) -> list[Panel]:
    """Return perplexity against the strength of Frobenius decay: one panel for each size."""
    panels = []
    for size in (TINY, DECODER):
        series = {k: some for k, some in sweeps(results).items() if k[0].startswith(size)}
        lines = {
            " ".join(key): [(row.strength, mean(row.scores("perplexity"))) for row in some if row.strength]
            for key, some in series.items()
        }
        panels.append(Panel("strength of Frobenius decay", "perplexity per word, held-out text", lines, log="x"))
    return panels


def sweeps(results: Path) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows with Frobenius decay and spectral initialization, by recipe: the tiny ones first."""
    found = [row for row in read_rows("language", results) if row.name.endswith("-si-fd")]
    return by_series(sorted(found, key=lambda row: (not row.name.startswith(TINY), row.series, row.strength or 0.0)))


FIGURES: dict[str, Callable[[Path], list[Panel]]] = {
    "translation": translation_panels,
    "language": language_panels,
    "strength": strength_panels,
}


def panels_of(name: str, results: Path) -> list[Panel]:
    """Return the panels of a figure that have something to show."""
    return [panel for panel in FIGURES[name](results) if panel.lines]


def image(name: str, alt: str, results: Path) -> str:
    """Return a figure as Markdown; nothing where there is nothing to show."""
    return f"![{alt}](figures/{name}.svg)" if panels_of(name, results) else ""


def draw_all() -> None:
    """Write every figure that has something to show."""
    for name in FIGURES:
        if panels := panels_of(name, RESULTS):
            draw(panels, FOLDER / f"{name}.svg")
