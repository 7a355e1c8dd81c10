"""Charts of a benchmark's report, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factorized.experiments.reproduce.paper_figures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
FIRST, OURS, OTHERS = "0.6", "C0", "C1"  # colours: what is compared with, this package, and everything else
BY_HAND = ("a plain pair", "four products", "a penalty", "torch.", "tensorly", "peft", "ordinary")
SMALL = 8  # points


def draw(report: Report, folder: Path) -> list[Path]:
    """Write the chart of a report as ``NAME.png`` and ``NAME.svg``, and return the files; none for no rows."""
    if not report["rows"]:
        return []
    figure, written = figure_of(report), []
    for kind in ("png", "svg"):
        written.append(folder / f"{report['benchmark']}.{kind}")
        save_figure(figure, written[-1])
    return written


def figure_of(report: Report) -> Figure:
    """Return the figure of a report: lines for what grows, bars for everything else."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    rows: Rows = report["rows"]
    machine = f"{report['machine']['device']}, torch {report['machine']['torch']}, {report['clock']}"
    if any("grows" in row for row in rows):
        panels = _growth_panels(report)
    elif all("width" in row for row in rows):
        panels = _width_panels(rows)
    else:
        return bars({group: [row for row in rows if row["group"] == group] for group in _groups(rows)}, machine)
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(3.6 * across, 3.2 * down + 0.3), layout="constrained")
    figure.suptitle(machine, fontsize=SMALL)
    for place, (title, x, y, lines) in enumerate(panels):
        axes = figure.add_subplot(down, across, place + 1)
        for label, points in lines.items():
            colour = FIRST if label.startswith("dense") else None  # or the next one of matplotlib's
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, linewidth=1.2, label=label, color=colour)
        axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
        marks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.tick_params(which="both", labelsize=7)
        axes.set_title(title, fontsize=SMALL)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    return figure


def bars(groups: Mapping[str, Rows], title: str) -> Figure:
    """Return horizontal bars, a panel for each group: times as shares of the first row's, or in seconds alone."""
    from matplotlib.figure import Figure

    heights = [len(rows) + 1.6 for rows in groups.values()]
    figure = Figure(figsize=(7.5, 0.24 * sum(heights) + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=SMALL)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)
    for axes, (group, rows) in zip(panels[:, 0], groups.items(), strict=True):
        _bars(axes, group, rows)
    return figure


def _bars(axes: Axes, group: str, rows: Rows) -> None:
    first = rows[0]["ms"]["median"] if rows[0].get("over") is not None else 1e3
    shares = [row["ms"]["median"] / first for row in rows]
    spread = [
        [max(0.0, share - row["ms"]["least"] / first) for share, row in zip(shares, rows, strict=True)],
        [max(0.0, row["ms"]["largest"] / first - share) for share, row in zip(shares, rows, strict=True)],
    ]
    compared = rows[0].get("over") is not None
    colours = [FIRST if compared and row is rows[0] else colour_of(row["way"]) for row in rows]
    places = range(len(rows))
    axes.barh(places, shares, xerr=spread, color=colours, height=0.7, error_kw={"linewidth": 0.8, "capsize": 2})
    axes.set_yticks(places, [row["way"] for row in rows], fontsize=SMALL)
    axes.invert_yaxis()
    if compared:
        axes.axvline(1, color=FIRST, linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.15 * max(share + above for share, above in zip(shares, spread[1], strict=True)))
    for place, (share, above) in enumerate(zip(shares, spread[1], strict=True)):
        text = f"{share:.2f}" if compared else f"{share:.2g} s"
        axes.annotate(text, (share + above, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    what = f"time over that of “{rows[0]['way']}” ({rows[0]['ms']['median']:.3g} ms)" if compared else "seconds"
    axes.set_title(f"{group}: {what}", loc="left", fontsize=SMALL)
    axes.tick_params(axis="x", labelsize=7)


def colour_of(way: str) -> str:
    """Return the colour of a bar: ours, or what people write or install instead."""
    return FIRST if way == "dense" else OTHERS if way.startswith(BY_HAND) else OURS


Line = list[tuple[float, float]]


def _growth_panels(report: Report) -> list[tuple[str, str, str, dict[str, Line]]]:
    panels = []
    for quantity, unit in (("time", "ms a training step"), ("memory", "MiB at the peak")):
        for dimension in dict.fromkeys(row["grows"] for row in report["rows"]):
            rows = [row for row in report["rows"] if row["grows"] == dimension]
            exponents = {fit["way"]: fit[quantity] for fit in report["fits"] if fit["grows"] == dimension}
            lines: dict[str, Line] = {}
            for row in rows:
                label = f"{row['way']}: {dimension}^{exponents.get(row['way'], '?')}"
                value = row["ms"]["median"] if quantity == "time" else row["memory"] / 2**20
                lines.setdefault(label, []).append((row["size"], value))
            panels.append((f"{quantity} by {dimension}", dimension, unit, lines))
    return panels


def _width_panels(rows: Rows) -> list[tuple[str, str, str, dict[str, Line]]]:
    panels = []
    for share in dict.fromkeys(row["width"] // row["rank"] for row in rows):
        lines: dict[str, Line] = {}
        for row in (row for row in rows if row["width"] // row["rank"] == share):
            lines.setdefault(row["way"], []).append((row["width"], row["ms"]["median"] / 1e3))
        panels.append((f"rank = width / {share}", "width", "seconds", lines))
    return panels


def _groups(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["group"] for row in rows))
