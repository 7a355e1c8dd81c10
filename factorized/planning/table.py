"""A plan as a table for the terminal."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from factorized.planning.plan import Plan, PlanEntry

HEADINGS = ("layer", "type", "shape", "rank", "params", "MACs")


def plan_table(plan: Plan, width: int | None = None) -> str:
    """Return the plan as lines no longer than ``width``, the terminal's unless given."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    rows = [_row(entry) for entry in plan.entries]
    rows.append(
        ("total", plan.model, "", "", _change(plan.params, plan.params_after), _change(plan.macs, plan.macs_after))
    )
    used = [column for column in range(len(HEADINGS)) if column < 5 or plan.macs is not None]
    widths = [max(len(row[column]) for row in [HEADINGS, *rows]) for column in used]
    # What does not fit is taken from the layer names, which are still told apart by their ends.
    surplus = sum(widths) + 2 * (len(widths) - 1) - width
    widths[0] = max(12, widths[0] - max(0, surplus))
    lines = [_line(HEADINGS, used, widths), "-" * min(width, sum(widths) + 2 * (len(widths) - 1))]
    for row, entry in zip(rows, plan.entries, strict=False):
        lines.append(_line(row, used, widths))
        if entry.reason is not None:
            start = sum(widths[:3]) + 6
            lines[-1] = f"{lines[-1][:start]}{entry.reason}"[:width].rstrip()
    lines += [lines[1], _line(rows[-1], used, widths), *textwrap.wrap(_summary(plan), width)]
    return "\n".join(line[:width].rstrip() for line in lines)


def _row(entry: PlanEntry) -> tuple[str, ...]:
    shape = "x".join(map(str, entry.shape))
    tied = f" (tied to {entry.tied_to})" if entry.tied_to else ""
    return (
        (entry.name or "(model)") + tied,
        entry.type,
        shape,
        str(entry.rank or ""),
        _change(entry.params, entry.params_after) if not entry.tied_to else "shared",
        _change(entry.macs, entry.macs_after),
    )


def _change(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return ""
    return f"{_short(before)} -> {_short(after)}" if before != after else _short(before)


def _short(count: int) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= limit:
            scaled = count / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if scaled < 1000 else f"{scaled:.0f}{unit}"
    return f"{count:,}"


def _line(row: tuple[str, ...], used: list[int], widths: list[int]) -> str:
    cells = []
    for column, width in zip(used, widths, strict=True):
        text = row[column]
        if len(text) > width:
            text = "…" + text[-(width - 1) :]
        cells.append(text.rjust(width) if column >= 3 else text.ljust(width))
    return "  ".join(cells)


def _summary(plan: Plan) -> str:
    macs = f", {plan.macs_after / plan.macs:.4f} of the MACs" if plan.macs and plan.macs_after is not None else ""
    return (
        f"{plan.scheme}, {plan.budget}: {len(plan.selected)} of {len(plan.entries)} layers factorized, "
        f"{plan.ratio:.4f} of {plan.params:,} parameters{macs}"
    )
