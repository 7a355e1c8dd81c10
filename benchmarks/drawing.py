"""Line charts as SVG files that say what they were drawn from."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from factorized.experiments.reproduce.paper_figures import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# black becomes white and colours keep their hue where the reader's screen is dark
DARK = "@media (prefers-color-scheme: dark) {#figure_1 {filter: invert(0.9) hue-rotate(180deg)}}"
MOST_MARKS = 8  # with fewer values, a logarithmic axis is marked at each of them
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One chart: lines by label, and levels that have no x."""

    x_label: str
    y_label: str
    lines: dict[str, Points]
    levels: dict[str, float] = field(default_factory=dict)
    log: str = ""  # which axes are logarithmic: "x", "y" or "xy"
    title: str = ""
    paper: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    """What the paper has for lines of the same labels: x, y and deviation."""


def checksum(panels: list[Panel]) -> str:
    """Return the SHA-256 of everything that is drawn."""
    return hashlib.sha256(json.dumps([asdict(panel) for panel in panels]).encode()).hexdigest()


def drawn_from(path: Path) -> str | None:
    """Return the checksum of what a figure was drawn from; None where there is no figure."""
    if not path.is_file():
        return None
    found = re.search(r"<dc:description>(\w+)</dc:description>", path.read_text())
    return found[1] if found else None


def draw(panels: list[Panel], path: Path, width: float = 5) -> None:
    """Write the panels side by side, ``width`` inches each; a figure of the same data is left as it is."""
    if drawn_from(path) == checksum(panels):
        return
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(width * len(panels), 3.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for label, points in panel.lines.items():
                (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=label)
                if label in panel.paper:
                    x, y, deviation = zip(*panel.paper[label], strict=True)
                    style = {"color": line.get_color(), "linewidth": 0.8, "capsize": 3, "markerfacecolor": "none"}
                    axes.errorbar(x, y, deviation, fmt="s:", markersize=5, label=f"{label}, the paper", **style)
            for label, level in panel.levels.items():
                axes.axhline(level, color="grey", linestyle="--", linewidth=1, label=label)
            if "x" in panel.log:
                axes.set_xscale("log")
                marks = sorted({x for points in panel.lines.values() for x, _ in points})
                if len(marks) <= MOST_MARKS:
                    axes.set_xticks(marks)
                    axes.set_xticks([], minor=True)
                axes.xaxis.set_major_formatter("{x:.2g}")
            if "y" in panel.log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
            axes.set_title(panel.title, fontsize=9)
            axes.grid(visible=True, which="major", linewidth=0.3)
            axes.legend(fontsize=7)
        save(figure, path, checksum(panels))


def save(figure: Figure, path: Path, checksum: str) -> None:
    """Write a figure with the checksum of what it was drawn from, and with colours for a dark screen."""
    save_figure(figure, path, checksum)
    path.write_text(path.read_text().replace("</style>", f"{DARK}</style>", 1))
