"""A plan as a self-contained page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from factorized.planning.parts import shown_parts
from factorized.planning.table import everything_else, short_count

if TYPE_CHECKING:
    from factorized.planning.plan import Entry, Plan

# All rules are inside one class, so that they do not affect a notebook's page.
STYLE = """
.factorized-plan { color-scheme: light dark; --page: #fbfbfa; --text: #1d1f23; --soft: #686d76; --line: #e6e6e3;
  --dense: #d6e0ee; --kept: #2f6db5; --idle: #e4e4e1;
  box-sizing: border-box; max-width: 1120px; padding: 16px 20px; background: var(--page); color: var(--text);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums;
  @media (prefers-color-scheme: dark) { --page: #15171a; --text: #e8e9eb; --soft: #989ea8; --line: #2a2d32;
    --dense: #2b3f5a; --kept: #6ea8ec; --idle: #32353a; }
  & h1 { margin: 0; font-size: 28px; font-weight: 600; letter-spacing: -0.01em; overflow-wrap: anywhere; }
  & code, & .name { font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; padding: 0;
    overflow-wrap: anywhere; background: none; color: inherit; }
  & header p, & dt, & th, & small, & .arrow, & .about, & tr.dense { color: var(--soft); }
  & header p { margin: 4px 0 0; }
  & dl { display: grid; grid-template-columns: repeat(3, 1fr); gap: 20px 32px; margin: 28px 0 32px; padding: 0; }
  & dl.parts { grid-template-columns: repeat(4, 1fr); margin-top: 0; }
  & dl > div { border-top: 1px solid var(--line); padding-top: 10px; }
  & dt { font-weight: 400; }
  & dd { margin: 0; }
  & dd.big { font-size: 22px; font-weight: 600; letter-spacing: -0.01em; white-space: nowrap; }
  & .parts dd { font-size: 16px; }
  & .arrow { font-weight: 400; padding: 0 0.3em; }
  & table { width: 100%; margin: 0; border: 0; border-collapse: collapse; font-size: inherit; color: inherit; }
  & tr { background: none; }
  & th { font-weight: 400; font-size: 12px; text-align: left; white-space: nowrap; }
  & th, & td { padding: 5px 0 5px 24px; border: 0; border-bottom: 1px solid var(--line); vertical-align: top;
    text-align: left; }
  & th:first-child, & td:first-child { padding-left: 0; }
  & .number { text-align: right; white-space: nowrap; }
  & .about, & .name { line-height: 20px; }
  & .about { font-size: 12px; }
  & td.bars { width: 36%; }
  & small { display: block; font-size: 12px; line-height: 20px; }
  & .bar { position: relative; height: 12px; margin: 4px 0; }
  & .bar i { position: absolute; height: 12px; min-width: 2px; border-radius: 2px; background: var(--dense); }
  & .bar i + i { top: 3px; height: 6px; border-radius: 1px; background: var(--kept); }
  & .key i { display: inline-block; width: 22px; height: 10px; margin: 0 6px 0 0; border-radius: 2px;
    background: var(--dense); vertical-align: -1px; }
  & .key .kept { height: 6px; margin-left: 12px; border-radius: 1px; background: var(--kept); vertical-align: 1px; }
  & tr.dense .bar i { background: var(--idle); }
  & details > div { max-height: 480px; overflow: auto; }
  & summary { cursor: pointer; color: var(--soft); }
  @media (max-width: 720px) {
    & dl { grid-template-columns: repeat(2, auto); gap: 16px 20px; margin: 20px 0 24px; }
    & dl.parts { grid-template-columns: repeat(2, auto); }
    & dd.big { font-size: 18px; }
    & table, & tbody, & thead, & tfoot { display: block; }
    & th:not(.key), & td:empty { display: none; }
    & tr { display: grid; grid-template-columns: 1fr auto; gap: 2px 16px; padding: 8px 0;
      border-bottom: 1px solid var(--line); }
    & th, & td, & td.bars { width: auto; padding: 0; border: 0; }
    & td.about { grid-area: 2 / 1; }
    & td.bars { grid-area: 3 / 1 / 4 / 3; }
    & td[data-label="parameters"] { grid-area: 4 / 1; text-align: left; }
    & td[data-label="MACs"] { grid-area: 4 / 2; }
    & td.number::before { content: attr(data-label) " "; color: var(--soft); font-size: 12px; }
  }
}
"""
PAGE_STYLE = """
body { margin: 0; }
.factorized-plan { margin: 0 auto; min-height: 100vh; padding: 40px 32px 64px; max-width: 1184px; }
html { background: #fbfbfa; }
@media (prefers-color-scheme: dark) { html { background: #15171a; } }
@media (max-width: 720px) { .factorized-plan { padding: 24px 16px 40px; } }
"""


def plan_page(plan: Plan) -> str:
    """Return one HTML page that draws the plan: its totals, then a bar per layer; it loads nothing and runs no code."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plan for {escape(plan.model)}</title>
<style>{STYLE}{PAGE_STYLE}</style>
</head>
<body>
<div class="factorized-plan">
{_heading(plan)}
{_layers(plan)}
</div>
</body>
</html>
"""


def plan_fragment(plan: Plan) -> str:
    """Return the same for a notebook cell, with its layers collapsed and styles that affect nothing outside it."""
    return f"""<style>{STYLE}</style>
<div class="factorized-plan">
{_heading(plan)}
<details><summary>{len(plan.entries)} layers</summary>
<div>
{_layers(plan)}
</div>
</details>
</div>
"""


def _heading(plan: Plan) -> str:
    """Return what was asked for, the totals, and where the parameters are."""
    parts = f"""
<dl class="parts">
{_parts(plan)}
</dl>"""
    return f"""<header>
<h1>{escape(plan.model)}</h1>
<p>Factorization plan: <code>{escape(str(plan.scheme))}</code>, <code>{escape(plan.budget)}</code></p>
</header>
<dl>
{_totals(plan)}
</dl>{parts if shown_parts(plan.parts) else ""}"""


def _layers(plan: Plan) -> str:
    """Return the table with a bar per layer."""
    longest = max((max(entry.params, entry.params_after) for entry in plan.entries), default=0) or 1
    macs = '<th class="number">MACs</th>' if plan.macs is not None else ""
    rows = "\n".join(_row(entry, longest, plan.macs is not None) for entry in plan.entries)
    return f"""<table>
<thead><tr><th>layer</th><th>type and shape</th><th class="number">rank</th>
<th class="key"><i></i>dense<i class="kept"></i>factorized</th><th class="number">parameters</th>{macs}</tr></thead>
<tbody>
{rows}
</tbody>
<tfoot><tr><td>everything else</td><td></td><td></td><td><small>norms, and biases of layers</small></td>
{_number("parameters", short_count(everything_else(plan)))}{"<td></td>" if macs else ""}</tr></tfoot>
</table>"""


def _parts(plan: Plan) -> str:
    shown = shown_parts(plan.parts)
    shares = [(part, part.params / plan.params, part.params_after / plan.params_after) for part in shown]
    return "\n".join(
        f'<div><dt>{escape(part.name.capitalize())}</dt><dd>{before:.1%}<span class="arrow">→</span>{after:.1%}</dd>'
        f"<dd><small>{_change(part.params, part.params_after)}</small></dd></div>"
        for part, before, after in shares
    )


def _totals(plan: Plan) -> str:
    kept = f"{plan.ratio:.2%} of {plan.params:,}"
    figures = [("Parameters", _change(plan.params, plan.params_after), kept)]
    if plan.macs and plan.macs_after is not None:
        share = f"{plan.macs_after / plan.macs:.2%} of {plan.macs:,}"
        figures.append(("Multiply-accumulates", _change(plan.macs, plan.macs_after), share))
    figures.append(("Layers factorized", str(len(plan.selected)), f"{len(plan.skipped)} left dense"))
    return "\n".join(
        f'<div><dt>{title}</dt><dd class="big">{value}</dd><dd><small>{note}</small></dd></div>'
        for title, value, note in figures
    )


def _row(entry: Entry, longest: int, with_macs: bool) -> str:
    sizes = (entry.params,) if entry.rank is None else (entry.params, entry.params_after)
    bars = "".join(f'<i style="width:{size / longest:.2%}"></i>' for size in sizes if size)
    title = f"{entry.params:,} parameters dense, {entry.params_after:,} planned"
    drawing = f'<div class="bar" title="{title}">{bars}</div>' if bars else ""
    params = "shared" if entry.tied_to else _change(entry.params, entry.params_after)
    cells = [
        f'<td><span class="name">{escape(entry.name or "(model)")}</span></td>',
        f'<td class="about">{escape(entry.type)} {"×".join(map(str, entry.shape))}</td>',
        _number("rank", entry.rank_text),
        f'<td class="bars">{drawing}{_note(entry)}</td>',
        _number("parameters", params),
        _number("MACs", _change(entry.macs, entry.macs_after)) if with_macs else "",
    ]
    return f'<tr class="{"factorized" if entry.rank else "dense"}">{"".join(cells)}</tr>'


def _number(label: str, value: str) -> str:
    return f'<td class="number" data-label="{label}">{value}</td>'


def _note(entry: Entry) -> str:
    tied = f"shares the factors of {entry.tied_to}" if entry.tied_to else ""
    also = f"also {', '.join(entry.aliases)}" if entry.aliases else ""
    note = "; ".join(filter(None, (entry.reason, entry.note, tied, also)))
    return f"<small>{escape(note)}</small>" if note else ""


def _change(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return ""
    arrow = f'<span class="arrow">→</span>{short_count(after)}' if before != after else ""
    return short_count(before) + arrow
