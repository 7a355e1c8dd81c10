"""Tables in Markdown, figures as their cells, and pages in which they are replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, stdev


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], note: str | None = None, *, names: int = 1) -> str:
    """Return a table whose first columns are ``names`` and whose other columns are figures, with a note below."""
    lines = [columns, [*["---"] * names, *["---:"] * (len(columns) - names)], *rows]
    written = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return written if note is None else f"{written}\n\n{note}"


def figure(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean of some figures, with their standard deviation where there are several."""
    if not values:
        return "–"
    spread = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):,.{digits}f}{spread}"


def fill(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return ``text`` with each of these tables made again between ``<!-- table:NAME -->`` and ``<!-- end -->``."""
    for name, make in tables.items():
        block = f"<!-- table:{name} -->\n{make()}\n<!-- end -->"
        text = re.sub(rf"<!-- table:{name} -->.*?<!-- end -->", lambda _, new=block: new, text, flags=re.DOTALL)
    return text
