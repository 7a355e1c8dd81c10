"""A plan as a self-contained page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from factorized.planning.plan import Plan


def plan_page(plan: Plan) -> str:
    """Return one HTML page that draws the plan."""
    return f"<html><body><pre>{plan}</pre></body></html>"
