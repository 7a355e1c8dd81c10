"""Charts: round ticks, whole lines, names in the open."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from factorized.experiments.reproduce.chart import Line, line_chart, nice_ticks, whole_ticks


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


def test_a_chart_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no point to draw"):
        line_chart([Line("a", [(1, math.nan)], "dense")], "t")


def test_long_curves_are_drawn_without_a_mark_for_every_point() -> None:
    chart = line_chart([Line("a", [(x, float(x)) for x in range(200)], "dense")], "t")
    assert "<circle" not in chart
