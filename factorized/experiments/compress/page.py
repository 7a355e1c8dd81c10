"""One self-contained page about a compression: its scores, layers, spectra, and what recovery changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from factorized.experiments.reproduce.chart import Line, line_chart
from factorized.experiments.reproduce.report import page_template
from factorized.files.atomic import write_text
from factorized.planning.table import short_count

TEMPLATES = Path(__file__).parent / "templates"
PAGE = "compress.html"
WIDTH, HEIGHT = 150, 34  # of the drawing of a spectrum
LEAST = 1e-6  # share of the outputs at the bottom of it, and the least in the chart: what is below is rounding


def write_page(state: Mapping[str, Any], folder: Path) -> Path:
    """Write the page of a compression into its folder, and return its path."""
    write_text(folder / PAGE, compress_page(state))
    return folder / PAGE


def compress_page(state: Mapping[str, Any]) -> str:
    """Return the page; the network was compressed, and perhaps recovered."""
    from markupsafe import Markup

    stages = {name: state[name] for name in ("before", "compressed", "recovered") if name in state}
    rows = [{**row, "drawing": Markup(_drawing(row))} for row in _with_differences(state)]
    return page_template("compress.html", TEMPLATES).render(
        name=state["asked"]["model"],
        asked=state["asked"],
        examples=state["plan"]["examples"],
        score=state["score"],
        lower_is_better=state["lower_is_better"],
        stages=stages,
        improved=_improved(state),
        rows=rows,
        dense_layers=[entry for entry in state["plan"]["plan"]["entries"] if entry["reason"]],
        networks={**stages, **{form: state[form] for form in ("lowered", "composed") if form in state}},
        charts=[Markup(chart) for chart in _charts(state)],
        machine=state["machine"],
        seconds=state["seconds"],
        notes=state["notes"],
        short=short_count,
        percent=_percent,
        figure=_figure,
        score_figure=_score_figure,
    )


def _with_differences(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = state["differences"]
    columns = {"lost": "alone", "differs": "compressed", "differs_now": "recovered"}
    return [
        {**row, **{column: found.get(key, {}).get(row["name"]) for column, key in columns.items()}}
        for row in state["plan"]["layers"]
    ]


def _improved(state: Mapping[str, Any]) -> float | None:
    """Return how much better the score is after recovery; None without it."""
    if "recovered" not in state:
        return None
    after, now = (float(state[name]["scores"][state["score"]]) for name in ("compressed", "recovered"))
    return after - now if state["lower_is_better"] else now - after


def _charts(state: Mapping[str, Any]) -> list[str]:
    """Return the chart of differences along the network, and that of the recovery, each with its title."""
    names = [row["name"] for row in state["plan"]["layers"]]
    lines = []
    for place, stage in enumerate(("compressed", "recovered")):
        found = state["differences"].get(stage, {})
        points = [(float(n), max(LEAST, found[name])) for n, name in enumerate(names, start=1) if name in found]
        if points:
            lines.append(Line(stage, points, f"s{place}"))
    title = "How outputs differ from the dense network's, layer by layer"
    charts = [_figure_element(title, line_chart(lines, title, "layer", log=True), lines)] if lines else []
    rows = state["recovered"]["history"] if "recovered" in state else []
    for key, title in (
        ("test_accuracy", "Test accuracy while recovering, %"),
        (state["score"], f"{state['score'].capitalize()} while recovering"),
    ):
        points = [(float(row.get("epoch") or row["update"]), row[key]) for row in rows if row.get(key) is not None]
        if len(points) > 1:
            unit = "epoch" if "epoch" in rows[0] else "update"
            line = Line("recovered", points, "s1")
            dense = Line(
                "dense", [(x, state["before"]["scores"][state["score"]]) for x, _ in (points[0], points[-1])], "s4"
            )
            charts.append(_figure_element(title, line_chart([line, dense], title, unit), [line, dense]))
            break
    return charts


def _figure_element(title: str, chart: str, lines: Sequence[Line]) -> str:
    swatch = '<svg class="swatch" viewBox="0 0 26 8"><line class="curve" x1="0" x2="26" y1="4" y2="4"/></svg>'
    keys = "".join(f'<li class="{line.style}">{swatch}{escape(line.label)}</li>' for line in lines)
    return f'<figure><figcaption><h3>{escape(title)}</h3></figcaption>{chart}<ul class="legend">{keys}</ul></figure>'


def _drawing(row: Mapping[str, Any]) -> str:
    """Return the spectrum of a layer as bars on a logarithmic scale; those up to the rank are kept."""
    spectrum, full = row["spectrum"], row["full_rank"]
    if not spectrum:
        return '<small class="soft">no batch reaches it</small>'
    wide, bottom = WIDTH / len(spectrum), -math.log10(LEAST)
    largest = spectrum[0] or 1.0  # a weight of zeros keeps nothing
    heights = [HEIGHT * max(0.0, 1 + math.log10(max(value / largest, LEAST)) / bottom) for value in spectrum]
    kept = round(row["rank"] / full * len(spectrum))
    parts = []
    for style, first, last in (("kept", 0, kept), ("cut", kept, len(spectrum))):
        points = [f"{first * wide:.1f},{HEIGHT}"]
        for place in range(first, last):
            y = HEIGHT - heights[place]
            points += [f"{place * wide:.1f},{y:.1f}", f"{(place + 1) * wide:.1f},{y:.1f}"]
        points.append(f"{last * wide:.1f},{HEIGHT}")
        if last > first:
            parts.append(f'<polygon class="{style}" points="{" ".join(points)}"/>')
    told = f"{row['name']}: rank {row['rank']} of {full}"
    return (
        f'<svg class="spectrum" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(told)}">'
        f"<title>{escape(told)}</title>{''.join(parts)}</svg>"
    )


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{100 * share:.1f} %" if share >= 0.001 or share == 0 else f"{100 * share:.1g} %"


def _figure(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def _score_figure(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if name == "loss" else _figure(value)
