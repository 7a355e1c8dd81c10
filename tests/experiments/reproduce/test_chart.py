"""Charts: round ticks, whole lines, names in the open."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from factorized.experiments.reproduce.chart import (
    LEFT,
    Dot,
    Line,
    line_chart,
    log_ticks,
    nice_ticks,
    scatter_chart,
    strip_chart,
    whole_ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (80, 100, [80, 85, 90, 95, 100]),
        (0, 441, [0, 100, 200, 300, 400, 500]),
        (3, 3, [3, 3.5, 4]),
        (-2, 2, [-2, -1, 0, 1, 2]),
    ],
)
def test_ticks_are_round_and_span_the_values(low: float, high: float, expected: list[float]) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert len(ticks) <= 7
    if low != high:
        assert ticks == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 12), (1, 200), (0, 7), (5, 10_000)])
def test_epochs_are_whole_numbers_within_the_run(low: int, high: int) -> None:
    ticks = whole_ticks(low, high)
    assert 0 < len(ticks) <= 7
    assert low <= ticks[0] <= ticks[-1] <= high


def test_a_chart_is_well_formed_and_holds_every_point_with_its_value() -> None:
    lines = [
        Line("a & b", [(1, 2.0), (2, 3.5)], "dense", [(1, 1.5, 2.5), (2, 3, 4)]),
        Line("c", [(1, 1), (2, math.nan)], "weight"),
    ]
    chart = ET.fromstring(line_chart(lines, 'a "title"'))
    assert chart.get("aria-label") == 'a "title"'
    assert len(list(chart.iter("polyline"))) == 2
    assert len(list(chart.iter("polygon"))) == 1
    assert [title.text for title in chart.iter("title")] == ["a & b, 1: 2", "a & b, 2: 3.5", "c, 1: 1"]


def test_points_lie_where_their_values_say() -> None:
    chart = ET.fromstring(line_chart([Line("a", [(0, 0.0), (5, 50.0), (10, 100.0)], "dense")], "t"))
    (line,) = chart.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y2 < y0


def test_a_run_of_one_epoch_is_seen() -> None:
    chart = ET.fromstring(line_chart([Line("a", [(1, 47.0)], "dense"), Line("b", [(2, 48.0)], "dense")], "t"))
    points = list(chart.iter("circle"))
    assert [point.get("class") for point in points] == ["point alone", "point alone"]
    assert all(float(point.get("cx") or 0) > LEFT for point in points)  # not on the axis


def test_a_chart_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no point to draw"):
        line_chart([Line("a", [(1, math.nan)], "dense")], "t")


def places(chart: str) -> list[tuple[float, float]]:
    line = next(ET.fromstring(chart).iter("polyline"))
    return [(float(x), float(y)) for x, y in (p.split(",") for p in (line.get("points") or "").split())]


@pytest.mark.parametrize("log", [False, True])
def test_every_epoch_is_within_the_axes_the_first_one_too(log: bool) -> None:
    points = [(1, 3.1), (5, 80.0), (200, 94.3)]
    drawn = places(line_chart([Line("a", points, "s0", [(1, 2.0, 4.0), (200, 90.0, 96.0)])], "t", log=log))
    assert len(drawn) == 3
    assert all(44 <= x <= 408 and 10 <= y <= 214 for x, y in drawn)
    assert drawn[0][1] > drawn[1][1] > drawn[2][1]


def test_a_logarithmic_axis_is_for_values_far_apart() -> None:
    far, near = [(1, 1.0), (2, 10.0), (3, 100.0)], [(1, 1.0), (2, 2.0), (3, 3.0)]
    (_, a), (_, b), (_, c) = places(line_chart([Line("a", far, "s0")], "t", log=True))
    assert a - b == pytest.approx(b - c, abs=0.2)
    assert line_chart([Line("a", near, "s0")], "t", log=True) == line_chart([Line("a", near, "s0")], "t")
    below = [Line("a", [(1, -1.0), (2, 1000.0)], "s0")]
    assert line_chart(below, "t", log=True) == line_chart(below, "t")


@pytest.mark.parametrize(("low", "high"), [(0.0013, 2.3), (1.0, 1e30), (5.0, 5.0)])
def test_logarithmic_ticks_are_few_powers_of_ten_around_the_values(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert len(ticks) <= 8


def test_a_scatter_has_both_axes_alike_and_a_range_for_each_dot() -> None:
    dots = [Dot("a & b", 50.0, 52.0, "within", 50.0, 4.0), Dot("c", 90.0, 80.0, "off", 90.0, 1.0)]
    chart = ET.fromstring(scatter_chart(dots, "t", "x", "y"))
    circles = list(chart.iter("circle"))
    assert [c[0].text for c in circles] == ["a & b", "c"]
    ranges = [line for line in chart.iter("line") if line.get("class") == "reach"]
    assert len(ranges) == 2
    inside = [
        float(r.get("y1") or 0) <= float(c.get("cy") or 0) <= float(r.get("y2") or 0)
        for r, c in zip(ranges, circles, strict=True)
    ]
    assert inside == [True, False]


def test_ticks_of_a_scatter_are_within_it() -> None:
    chart = ET.fromstring(scatter_chart([Dot("a", 36.5, 38.0, "s0"), Dot("b", 94.0, 95.0, "s0")], "t", "x", "y"))
    heights = [float(line.get("y1") or 0) for line in chart.iter("line") if line.get("class") == "grid"]
    assert min(heights) >= 10
    assert max(heights) <= 214


def test_a_strip_has_a_band_and_a_stem_for_each_dot() -> None:
    chart = ET.fromstring(strip_chart([Dot("a", 0, 1.0, "within"), Dot("b", 1, -5.0, "off")], 2.0, "t", "y"))
    (band,) = chart.iter("rect")
    top, height = float(band.get("y") or 0), float(band.get("height") or 0)
    inside = [top <= float(c.get("cy") or 0) <= top + height for c in chart.iter("circle")]
    assert inside == [True, False]


def test_long_curves_are_drawn_without_a_mark_for_every_point() -> None:
    chart = line_chart([Line("a", [(x, float(x)) for x in range(200)], "dense")], "t")
    assert chart.count("<circle") == 1  # the end
