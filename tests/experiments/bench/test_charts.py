"""Charts are drawn from a report, show its figures, and are not blank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from factorized.experiments.bench.charts import FIRST, OTHERS, OURS, colour_of, draw, figure_of


def row(group: str, way: str, ms: float, **facts: Any) -> dict[str, Any]:
    return {
        "group": group,
        "way": way,
        "ms": {"median": ms, "least": 0.9 * ms, "largest": 2 * ms, "rounds": 3},
        **facts,
    }


def report(*rows: dict[str, Any], fits: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    machine = {"device": "a machine", "torch": "2.11"}
    return {"benchmark": "name", "machine": machine, "clock": "wall clock", "rows": list(rows), "fits": list(fits)}


BARS = report(
    row("step", "dense", 10.0, over=1.0),
    row("step", "low rank", 4.0, over=0.4),
    row("step", "tensorly-torch, Tucker", 25.0, over=2.5),
)
ALONE = report(row("a billion", "plan", 50.0), row("a billion", "save", 2000.0))
GROWTH = report(
    *(row(f"width {size}", "dense", size**2, grows="width", size=size, memory=2**20 * size) for size in (1, 2, 4)),
    fits=({"grows": "width", "way": "dense", "time": 2.0, "memory": 1.0},),
)
WIDTHS = report(
    *(row(f"{n}", way, n, width=n, rank=n // 4) for n in (512, 1024) for way in ("exact SVD", "factorized"))
)


def texts(drawn: dict[str, Any]) -> str:
    figure = figure_of(drawn)
    FigureCanvasAgg(figure).draw()
    panels = [
        text for axes in figure.axes for text in (*axes.texts, axes.title, axes._left_title, *axes.get_yticklabels())
    ]
    legends = [text for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    return "\n".join(text.get_text() for text in [*panels, *legends, figure._suptitle])


@pytest.mark.parametrize(
    ("drawn", "shown"),
    [
        (BARS, ["dense", "0.40", "2.50", "time over that of “dense” (10 ms)", "a machine, torch 2.11, wall clock"]),
        (ALONE, ["0.05 s", "2 s", "a billion: seconds"]),
        (GROWTH, ["time by width", "memory by width", "dense: width^2.0", "dense: width^1.0"]),
        (WIDTHS, ["rank = width / 4", "exact SVD", "factorized"]),
    ],
)
def test_a_chart_shows_the_figures_of_its_report(drawn: dict[str, Any], shown: list[str]) -> None:
    assert [word for word in shown if word not in texts(drawn)] == []


@pytest.mark.parametrize("drawn", [BARS, ALONE, GROWTH, WIDTHS], ids=["bars", "alone", "growth", "widths"])
def test_charts_are_written_as_png_and_svg_and_are_not_blank(drawn: dict[str, Any], tmp_path: Path) -> None:
    png, svg = draw(drawn, tmp_path / "new")
    assert (png.name, svg.name) == ("name.png", "name.svg")
    pixels = np.asarray(Image.open(png).convert("RGB"))
    assert min(pixels.shape[:2]) > 150
    coloured = (pixels.max(axis=2).astype(int) - pixels.min(axis=2) > 60).mean()
    assert coloured > 0.002 or drawn is GROWTH  # whose one line is grey
    assert (pixels < 128).any(axis=2).mean() > 0.005
    assert "<svg" in svg.read_text()
    before = svg.read_text()
    assert draw(drawn, tmp_path / "new")[1].read_text() == before


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert draw(report(), tmp_path) == []


def test_a_bar_is_as_long_as_its_share_and_coloured_by_who_wrote_it() -> None:
    (axes,) = figure_of(BARS).axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 0.4, 2.5]
    assert [colour_of(way) for way in ("dense", "low rank 0.1", "peft, PiSSA", "a plain pair of layers")] == [
        FIRST,
        OURS,
        OTHERS,
        OTHERS,
    ]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write .*file.*choose another folder"):
        draw(BARS, tmp_path / "file" / "below")
