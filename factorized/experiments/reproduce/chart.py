"""Charts as inline SVG that takes its colours from the page: light, dark, and as wide as the screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

SIZE, SMALL = (420, 250), (300, 190)  # a unit is about a pixel, so that letters keep their size
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 36
MOST_POINTS = 80  # of a line whose points can be pointed at
DECADES = 1.0  # from this many powers of ten on, an axis is logarithmic where that is allowed


@dataclass(frozen=True)
class Line:
    """A curve: the mean of some runs, with their minimum and maximum."""

    label: str
    points: Sequence[tuple[float, float]]  # (x, y), x ascending
    style: str  # classes of the page's style sheet
    band: Sequence[tuple[float, float, float]] = field(default=())  # (x, least, greatest)

    def since(self, x: float) -> Line:
        """Return the part of it from ``x`` on."""
        points = [point for point in self.points if point[0] >= x]
        return Line(self.label, points, self.style, [part for part in self.band if part[0] >= x])


@dataclass(frozen=True)
class Dot:
    """A point with a name, and the range around ``expected`` that it should be in."""

    label: str
    x: float
    y: float
    style: str
    expected: float | None = None
    reach: float = 0.0  # half the range


def line_chart(
    lines: Sequence[Line],
    title: str,
    x_label: str = "epoch",
    size: tuple[int, int] = SIZE,
    *,
    log: bool = False,
) -> str:
    """Return the chart as an SVG element; its axes hold every point of every line and band.

    ``log`` allows a logarithmic axis, which is used where all values are positive and far apart.
    """
    lines = [_finite(line) for line in lines]
    every = [point for line in lines for point in line.points]
    if not every:
        raise ValueError(f"the chart {title!r} has no point to draw")
    xs = [x for x, _ in every]
    if all(len(line.points) < 2 for line in lines):
        xs.append(0.0)  # the ends of runs, which began there
    scale = _Scale.of(xs, _heights(lines), size, log=log and uses_log(lines))
    parts = [
        *_axes(scale, whole_ticks(scale.x_low, scale.x_high), scale.ticks, x_label),
        *(
            f'<g class="series {line.style}" data-series="{escape(line.label)}">'
            f"{_band(line, scale)}{_curve(line, scale)}</g>"
            for line in lines
        ),
    ]
    return _svg(size, title, parts)


def uses_log(lines: Sequence[Line]) -> bool:
    """Return whether values are so far apart that a logarithmic axis shows more."""
    values = _heights(lines)
    return min(values) > 0 and math.log10(max(values) / min(values)) >= DECADES


def _heights(lines: Sequence[Line]) -> list[float]:
    return [y for line in lines for y in (*(y for _, y in line.points), *(y for _, *ends in line.band for y in ends))]


def scatter_chart(dots: Sequence[Dot], title: str, x_label: str, y_label: str) -> str:
    """Return dots with the ranges in which they should be, around the line on which both axes agree."""
    if not dots:
        raise ValueError(f"the chart {title!r} has no point to draw")
    ends = [y for dot in dots if dot.expected is not None for y in (dot.expected - dot.reach, dot.expected + dot.reach)]
    both = [*(dot.x for dot in dots), *(dot.y for dot in dots), *ends]
    ticks = nice_ticks(min(both), max(both), most=9)
    low, high = ticks[0], ticks[-1]
    scale = _Scale(low, high, low, high, *SIZE)
    parts = [
        *_axes(scale, ticks, ticks, x_label, y_label),
        f'<polyline class="diagonal" points="{scale.at(low, low)} {scale.at(high, high)}"/>',
        *(_range(dot, scale) for dot in dots),
        *(_dot(dot, scale) for dot in dots),
    ]
    return _svg(SIZE, title, parts)


def strip_chart(dots: Sequence[Dot], band: float, title: str, y_label: str) -> str:
    """Return dots side by side above and below zero, with the band in which they should be."""
    if not dots:
        raise ValueError(f"the chart {title!r} has no point to draw")
    heights = [*(dot.y for dot in dots), -band - 1, band + 1]
    scale = _Scale.of([-0.7, len(dots) - 0.3], heights, SIZE)
    left, right = scale.x(scale.x_low), scale.x(scale.x_high)
    top, bottom, zero = scale.y(band), scale.y(-band), scale.y(0)
    parts = [
        f'<rect class="within" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"/>',
        *_axes(scale, (), scale.ticks, "", y_label),
        f'<line class="diagonal" x1="{left:.1f}" x2="{right:.1f}" y1="{zero:.1f}" y2="{zero:.1f}"/>',
        *(
            f'<line class="stem {dot.style}" x1="{scale.x(dot.x):.1f}" x2="{scale.x(dot.x):.1f}" y1="{zero:.1f}" '
            f'y2="{scale.y(dot.y):.1f}"/>'
            for dot in dots
        ),
        *(_dot(dot, scale) for dot in dots),
    ]
    return _svg(SIZE, title, parts)


def seed_dots(values: Sequence[float], low: float, high: float, label: str) -> str:
    """Return a small drawing of some values and their mean between two ends, which are those of all rows."""
    span = (high - low) or 1.0
    places = [4 + 112 * (value - low) / span for value in values]
    mean = sum(places) / len(places)
    marks = "".join(f'<circle cx="{place:.1f}" cy="9" r="3.5"/>' for place in places)
    return (
        f'<svg class="dots" viewBox="0 0 120 18" role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>'
        f'<line x1="0" x2="120" y1="9" y2="9"/>{marks}<rect x="{mean - 1:.1f}" y="1" width="2" height="16"/></svg>'
    )


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most ``most`` round numbers from ``low`` or below it to ``high`` or above it."""
    span = (high - low) or abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / most))
    for step in (power * factor for factor in (1, 2, 2.5, 5, 10, 20)):
        first, final = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if final - first < most:
            return [round(number * step, 12) for number in range(first, max(final, first + 1) + 1)]
    return [low, high]


def whole_ticks(low: float, high: float) -> list[int]:
    """Return at most seven whole numbers within ``low`` and ``high``, multiples of a round step."""
    step = next(
        factor * 10**power
        for power in range(19)
        for factor in (1, 2, 5)
        if math.floor(high / (factor * 10**power)) - math.ceil(low / (factor * 10**power)) < 7
    )
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten from ``low`` or below it to ``high`` or above it, at most seven of them."""
    first, final = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    step = max(1, math.ceil((final - first) / 6))
    return [10.0**power for power in range(first, final + step, step)]


@dataclass(frozen=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int
    height: int
    log: bool = False

    @staticmethod
    def of(xs: Sequence[float], ys: Sequence[float], size: tuple[int, int], *, log: bool = False) -> _Scale:
        """Return the scale whose ends are round numbers that hold every value."""
        ticks = log_ticks(min(ys), max(ys)) if log else nice_ticks(min(ys), max(ys))
        first = 0.0 if 0 < min(xs) <= max(xs) / 3 else min(xs)  # a run from its start is drawn from 0
        return _Scale(first, max(xs), ticks[0], ticks[-1], *size, log)

    @property
    def ticks(self) -> list[float]:
        return log_ticks(self.y_low, self.y_high) if self.log else nice_ticks(self.y_low, self.y_high)

    def x(self, value: float) -> float:
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1)
        return LEFT + share * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = (math.log(self.y_low), math.log(self.y_high)) if self.log else (self.y_low, self.y_high)
        share = ((math.log(value) if self.log else value) - low) / ((high - low) or 1)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f},{self.y(y):.1f}"


def _svg(size: tuple[int, int], title: str, parts: Sequence[str]) -> str:
    head = f'<svg class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])


def _axes(
    scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str = ""
) -> list[str]:
    parts = []
    right, bottom = scale.width - RIGHT, scale.height - BOTTOM
    for tick in y_ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x = scale.x(tick)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    middle = (LEFT + right) / 2
    if x_label:
        parts.append(f'<text class="tick" x="{middle}" y="{bottom + 31}" text-anchor="middle">{escape(x_label)}</text>')
    if y_label:
        place = f'x="11" y="{(TOP + bottom) / 2}" transform="rotate(-90 11 {(TOP + bottom) / 2})"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _finite(line: Line) -> Line:
    points = [point for point in line.points if math.isfinite(point[1])]
    return Line(line.label, points, line.style, [part for part in line.band if all(map(math.isfinite, part))])


def _band(line: Line, scale: _Scale) -> str:
    if not line.band:
        return ""
    there = [scale.at(x, high) for x, _, high in line.band]
    back = [scale.at(x, low) for x, low, _ in reversed(line.band)]
    return f'<polygon class="band" points="{" ".join(there + back)}"/>'


def _curve(line: Line, scale: _Scale) -> str:
    style = "point alone" if len(line.points) == 1 else "point"  # a line of one point is not seen
    drawn = [f'<polyline class="curve" points="{" ".join(scale.at(x, y) for x, y in line.points)}"/>']
    for x, y in line.points if len(line.points) <= MOST_POINTS else line.points[-1:]:
        told = f"{line.label}, {x:g}: {y:.4g}"
        place = f'cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}"'
        drawn.append(f'<circle class="{style}" {place} r="5"><title>{escape(told)}</title></circle>')
    return "".join(drawn)


def _range(dot: Dot, scale: _Scale) -> str:
    if dot.expected is None or not dot.reach:
        return ""
    x, high, low = scale.x(dot.x), scale.y(dot.expected + dot.reach), scale.y(dot.expected - dot.reach)
    return f'<line class="reach" x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}"/>'


def _dot(dot: Dot, scale: _Scale) -> str:
    place = f'cx="{scale.x(dot.x):.1f}" cy="{scale.y(dot.y):.1f}"'
    return f'<circle class="dot {dot.style}" {place} r="4"><title>{escape(dot.label)}</title></circle>'
