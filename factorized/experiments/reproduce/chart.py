"""Line charts as inline SVG that takes its colours from the page: light, dark, and as wide as the screen."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

SIZE, SMALL = (420, 250), (300, 190)  # a unit is about a pixel, so that letters keep their size
LEFT, RIGHT, TOP, BOTTOM = 36, 12, 10, 34
MOST_POINTS = 60  # of a line whose points can be pointed at


@dataclass(frozen=True)
class Line:
    """A curve: the mean of some runs, with their minimum and maximum."""

    label: str
    points: Sequence[tuple[float, float]]  # (x, y), x ascending
    style: str  # classes of the page's style sheet
    band: Sequence[tuple[float, float, float]] = field(default=())  # (x, least, greatest)


def line_chart(
    lines: Sequence[Line],
    title: str,
    x_label: str = "epoch",
    y_range: tuple[float, float] | None = None,
    size: tuple[int, int] = SIZE,
) -> str:
    """Return the chart as an SVG element, clipped to ``y_range``."""
    every = [point for line in lines for point in line.points if math.isfinite(point[1])]
    if not every:
        raise ValueError(f"the chart {title!r} has no point to draw")
    low, high = y_range or (min(0.0, *(y for _, y in every)), max(y for _, y in every))
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    width, height = size
    scale = _Scale(min(x for x, _ in every), max(x for x, _ in every), low, high, width, height)
    clip = f"clip-{zlib.crc32(title.encode()):08x}"
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP - 4}" width="{width - LEFT - RIGHT + 4}" '
        f'height="{height - TOP - BOTTOM + 6}"/></clipPath>',
        *_axes(scale, ticks, x_label),
        f'<g clip-path="url(#{clip})">',
        *(_band(line, scale) for line in lines if line.band),
        *(_curve(line, scale) for line in lines),
        "</g></svg>",
    ]
    return "\n".join(parts)


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most ``most`` round numbers from ``low`` or below it to ``high`` or above it."""
    span = (high - low) or abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / most))
    for step in (power * factor for factor in (1, 2, 2.5, 5, 10, 20)):
        first, final = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if final - first < most:
            return [round(number * step, 12) for number in range(first, max(final, first + 1) + 1)]
    return [low, high]


def whole_ticks(low: float, high: float, most: int = 7) -> list[int]:
    """Return at most ``most`` whole numbers within ``low`` and ``high``, multiples of a round step."""
    step = next(
        factor * 10**power
        for power in range(19)
        for factor in (1, 2, 5)
        if math.floor(high / (factor * 10**power)) - math.ceil(low / (factor * 10**power)) < most
    )
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int
    height: int

    def x(self, value: float) -> float:
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1)
        return LEFT + share * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f},{self.y(y):.1f}"


def _axes(scale: _Scale, ticks: Sequence[float], x_label: str) -> list[str]:
    parts = []
    right, bottom = scale.width - RIGHT, scale.height - BOTTOM
    for tick in ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in whole_ticks(scale.x_low, scale.x_high):
        x = scale.x(tick)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{bottom + 30}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _band(line: Line, scale: _Scale) -> str:
    there = [scale.at(x, high) for x, _, high in line.band]
    back = [scale.at(x, low) for x, low, _ in reversed(line.band)]
    return f'<polygon class="band {line.style}" points="{" ".join(there + back)}"/>'


def _curve(line: Line, scale: _Scale) -> str:
    points = [(x, y) for x, y in line.points if math.isfinite(y)]
    path = " ".join(scale.at(x, y) for x, y in points)
    drawn = [f'<polyline class="curve {line.style}" points="{path}"/>']
    for x, y in points if len(points) <= MOST_POINTS else ():
        told = f"{line.label}, {x:g}: {y:.4g}"
        place = scale.at(x, y).split(",")
        drawn.append(
            f'<circle class="point" cx="{place[0]}" cy="{place[1]}" r="5"><title>{escape(told)}</title></circle>'
        )
    return "".join(drawn)
