"""A comparison as one page: table, curves, checks, versions; it loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from factorized.experiments.reproduce.chart import SMALL, Line, line_chart, nice_ticks
from factorized.experiments.reproduce.variant import Variant

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Check:
    """A condition that must hold, with what was measured."""

    what: str
    measured: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether it holds; NaN does not."""
        return self.measured <= self.allowed

    @property
    def figures(self) -> str:
        """What was measured, beside what is allowed."""
        return f"{self.measured:.3g} (allowed {self.allowed:g})"


@dataclass(frozen=True)
class Panel:
    """A chart with its title and what to see in it."""

    title: str
    svg: str
    note: str = ""


def report_page(
    title: str,
    lead: str,
    command: str,
    variants: Sequence[Variant],
    checks: Sequence[Check] = (),
) -> str:
    """Return the page that compares ``variants``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    machine = variants[0].results[0]["machine"]
    return environment.get_template("report.html").render(
        title=title,
        lead=lead,
        command=command,
        variants=variants,
        most=max(max(variant.parameters, variant.deployed) for variant in variants),
        span=_accuracy_span(variants),
        has_paper=any(variant.paper and variant.paper["accuracy"] is not None for variant in variants),
        curves=_curve_panels(variants),
        products=_product_panels(variants),
        checks=checks,
        machine={name: value for name, value in machine.items() if value is not None},
        seeds=[result["seed"] for result in variants[0].results],
        data=variants[0].results[0]["data"],
    )


def _curve_panels(variants: Sequence[Variant]) -> list[Panel]:
    accuracy = [line for variant in variants if (line := variant.curve("test_accuracy")) is not None]
    loss = [line for variant in variants if (line := variant.curve("loss")) is not None]
    low = nice_ticks(_focus(accuracy), 100)[0]
    note = f"The axis starts at {low:g} %." if low else ""
    highest = max(y for line in loss for x, y in line.points if x > 1 or len(line.points) == 1)
    return [
        Panel("Test accuracy", line_chart(accuracy, "Test accuracy in percent by epoch", y_range=(low, 100)), note),
        Panel("Training loss", line_chart(loss, "Training loss by epoch", y_range=(0, highest))),
    ]


def _focus(lines: Sequence[Line]) -> float:
    """Return where the axis of accuracies begins: low enough for the last quarter of every curve."""
    later = [y for line in lines for _, y in line.points[len(line.points) * 3 // 4 :]]
    return max(0.0, 10 * ((min(later) - 5) // 10))


def _product_panels(variants: Sequence[Variant]) -> list[Panel]:
    panels = []
    for variant in variants:
        norm = variant.curve("nuclear", "nuclear norm", "nuclear")
        bound = variant.curve("nuclear_bound", "bound", "bound")
        if norm is None or bound is None:
            continue
        ratio = bound.points[-1][1] / norm.points[-1][1]
        svg = line_chart([bound, norm], f"Nuclear norm and its bound by epoch, {variant.label}", size=SMALL)
        panels.append(Panel(variant.label, svg, f"at the end, the bound is {ratio:.2f} times the norm"))
    return panels


def _accuracy_span(variants: Sequence[Variant]) -> tuple[float, float]:
    """Return the accuracies between which the table draws its dots."""
    found = [result["accuracy"] for variant in variants for result in variant.results]
    margin = 0.08 * ((max(found) - min(found)) or 1)
    return min(found) - margin, max(found) + margin
