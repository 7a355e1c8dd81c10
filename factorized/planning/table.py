"""A plan as a table for the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from factorized.planning.parts import shown_parts

if TYPE_CHECKING:
    from factorized.planning.plan import Entry, Plan

HEADINGS = ("layer", "type", "shape", "rank", "params", "MACs")
FIRST_TO_GO = ("type", "MACs", "shape")  # columns dropped, in this order, in a narrow terminal
NARROWEST_NAME = 12
NARROWEST_NOTE = 24
GAP = "  "

Row = tuple[str, ...]


def plan_table(plan: Plan, width: int | None = None) -> str:
    """Return the plan as lines no longer than ``width``, by default the terminal's; names and reasons are never cut."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    rows = [_row(entry) for entry in plan.entries]
    rest = ("", "", "", "", short_count(everything_else(plan)), "")
    total = ("total", plan.model, "", "", _change(plan.params, plan.params_after), _change(plan.macs, plan.macs_after))
    widths = _fit(
        {h: max(len(row[i]) for row in (HEADINGS, *rows, rest, total)) for i, h in enumerate(HEADINGS)}, plan, width
    )
    rule = "-" * min(width, _length(widths))
    lines = [*_lines(HEADINGS, widths, width), rule]
    for entry, row in zip(plan.entries, rows, strict=True):
        lines += _lines(row, widths, width, _note(entry))
    label, (line,) = "everything else", _lines(rest, widths, width)  # across columns that are empty
    lines.append(label + line[len(label) :])
    lines += [rule, *_lines(total, widths, width), *_parts(plan), *textwrap.wrap(_summary(plan), width)]
    return "\n".join(line[:width].rstrip() for line in lines)


def everything_else(plan: Plan) -> int:
    """Return the parameters that are in no entry: of norms, and biases of layers."""
    return plan.params - sum(entry.params for entry in plan.entries)


def short_count(count: int) -> str:
    """Return a count as short text: 3,456 or 36.9k or 7.43M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= limit:
            scaled = count / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if scaled < 999.5 else f"{scaled:.0f}{unit}"
    return f"{count:,}"


def _row(entry: Entry) -> Row:
    shape, name = "x".join(map(str, entry.shape)), entry.name or "(model)"
    if not entry.rank_text:
        return name, entry.type, shape, "", "", ""
    params = "shared" if entry.tied_to else _change(entry.params, entry.params_after)
    return name, entry.type, shape, entry.rank_text, params, _change(entry.macs, entry.macs_after)


def _note(entry: Entry) -> str:
    return entry.reason or entry.note or (f"tied to {entry.tied_to}" if entry.tied_to else "")


def _change(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return ""
    return f"{short_count(before)} -> {short_count(after)}" if before != after else short_count(before)


def _fit(widths: dict[str, int], plan: Plan, width: int) -> dict[str, int]:
    """Drop columns, then narrow the names', until a row fits."""
    if plan.macs is None:
        widths = {heading: extent for heading, extent in widths.items() if heading != "MACs"}
    widths = fitting(widths, FIRST_TO_GO, width)
    surplus = max(0, _length(widths) - width)
    return widths | {"layer": max(min(NARROWEST_NAME, widths["layer"]), widths["layer"] - surplus)}


def fitting(widths: dict[str, int], first_to_go: Sequence[str], width: int) -> dict[str, int]:
    """Return columns without those that go first, as far as that is needed for a row to fit."""
    for heading in first_to_go:
        if _length(widths) > width:
            widths = {kept: extent for kept, extent in widths.items() if kept != heading}
    return widths


def joined(cells: Mapping[str, str], widths: Mapping[str, int], numbers: Sequence[str]) -> str:
    """Return the cells of these columns as a line, numbers to the right."""
    return GAP.join(cells[h].rjust(width) if h in numbers else cells[h].ljust(width) for h, width in widths.items())


def _length(widths: dict[str, int]) -> int:
    return sum(widths.values()) + len(GAP) * (len(widths) - 1)


def _lines(row: Row, widths: dict[str, int], width: int, note: str = "") -> list[str]:
    """Return one row; a name or a note that does not fit beside the rest goes on separate lines."""
    cells = {heading: cell for heading, cell in zip(HEADINGS, row, strict=True) if heading in widths}
    above = []
    if len(cells["layer"]) > widths["layer"]:
        above, cells["layer"] = textwrap.wrap(cells["layer"], width), ""
    figures = ("rank", "params", "MACs")
    line = joined(cells, widths, figures)
    start = _length({heading: extent for heading, extent in widths.items() if heading not in figures}) + len(GAP)
    beside = not any(cells.get(heading) for heading in figures) and width - start >= NARROWEST_NOTE
    notes = textwrap.wrap(note, width - start if beside else max(width - 4, 8))
    if beside and notes:
        line = line[:start].ljust(start) + notes.pop(0)
    return [*above, line, *((" " * (start if beside else 4)) + more for more in notes)]


def _summary(plan: Plan) -> str:
    macs = f", {plan.macs_after / plan.macs:.4f} of the MACs" if plan.macs and plan.macs_after is not None else ""
    return (
        f"{plan.scheme}, {plan.budget}: {len(plan.selected)} of {len(plan.entries)} layers factorized, "
        f"{plan.ratio:.4f} of {plan.params:,} parameters{macs}{_attention_macs(plan)}"
    )


def _parts(plan: Plan) -> list[str]:
    """Return a line per part of the model: its share of the parameters before and after."""
    held = shown_parts(plan.parts)
    longest = max((len(part.name) for part in held), default=0)
    return [
        f"{part.name.ljust(longest)}  {part.params / plan.params:6.1%} of the parameters"
        f"{GAP}-> {part.params_after / plan.params_after:6.1%} after"
        for part in held
    ]


def _attention_macs(plan: Plan) -> str:
    """Return attention's share of the MACs before and after, where the plan has any."""
    units = [entry for entry in plan.entries if entry.is_attention]
    if not (units and plan.macs and plan.macs_after):
        return ""
    before, after = sum(e.macs or 0 for e in units), sum(e.macs_after or 0 for e in units)
    return f"; attention takes {before / plan.macs:.4f} of the MACs, {after / plan.macs_after:.4f} after"
