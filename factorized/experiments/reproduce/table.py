"""A table, defined once: as HTML with values to sort by, as CSV with every digit, and as Markdown."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Raw = str | float | None  # of a cell of CSV
Item = TypeVar("Item")  # what a row is about


@dataclass(frozen=True)
class Column:
    """A heading; ``parts`` are the columns of CSV that it stands for."""

    name: str
    number: bool = False
    parts: tuple[str, ...] = ()
    long: bool = False  # sentences, which are wrapped

    @property
    def raw_names(self) -> tuple[str, ...]:
        """The headings in CSV."""
        return self.parts or (self.name,)


@dataclass(frozen=True)
class Value:
    """The content of a cell: the text shown, and the value behind it."""

    text: str
    raw: tuple[Raw, ...] = ()  # one for each part of the column; the text unless given
    small: str = ""  # a second line
    tone: str = ""  # a class of the page's style sheet
    chips: tuple[str, ...] = ()
    drawing: str = ""  # SVG, in place of the text on the page

    @property
    def sort(self) -> str:
        """What the page sorts by: the number without its rounding, or the text."""
        first = self.raw[0] if self.raw else self.text
        return "" if first is None else str(first)


Columns = Sequence[tuple[Column, Callable[[Item], Value]]]  # each with what its cell shows of an item


@dataclass(frozen=True)
class Table:
    """Rows under headings."""

    slug: str  # the name of its files
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    note: str = ""
    tones: Sequence[str] = field(default=())  # of the rows, if any

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.slug}: expected {len(self.columns)} cells, got {len(row)}")

    @classmethod
    def of(
        cls,
        slug: str,
        title: str,
        items: Iterable[Item],
        columns: Columns[Item],
        note: str = "",
        tones: Sequence[str] = (),
    ) -> Table:
        """Return a table with a row for each item."""
        rows = [[cell(item) for _, cell in columns] for item in items]
        return cls(slug, title, [column for column, _ in columns], rows, note, tones)

    def to_csv(self) -> str:
        """Return the table as CSV, numbers with all their digits."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(name for column in self.columns for name in column.raw_names)
        for row in self.rows:
            writer.writerow(
                _plain(raw) for value, column in zip(row, self.columns, strict=True) for raw in _raw(value, column)
            )
        return out.getvalue()

    def to_markdown(self) -> str:
        """Return the table as Markdown, as it is shown."""
        lines = [
            _line(column.name for column in self.columns),
            _line("---:" if column.number else "---" for column in self.columns),
        ]
        lines += [_line(_words(value) for value in row) for row in self.rows]
        return "\n".join([f"## {self.title}", "", *lines, *(("", self.note) if self.note else ()), ""])

    @property
    def csv_link(self) -> str:
        """The CSV as an address, for a page that needs no other file."""
        return _link("text/csv", self.to_csv())

    @property
    def markdown_link(self) -> str:
        """The Markdown as an address."""
        return _link("text/markdown", self.to_markdown())


def _raw(value: Value, column: Column) -> tuple[Raw, ...]:
    raw = value.raw or (value.text,)
    return raw if len(raw) == len(column.raw_names) else raw + (None,) * (len(column.raw_names) - len(raw))


def _plain(raw: Raw) -> str:
    """Return a cell of CSV; text that a spreadsheet would take for a formula gets an apostrophe before it."""
    if isinstance(raw, str):
        return f"'{raw}" if raw[:1] in ("=", "+", "-", "@") else raw
    return "" if raw is None else repr(raw)


def _words(value: Value) -> str:
    told = " ".join(part for part in (value.text, value.small and f"({value.small})", *value.chips) if part)
    return told.replace("|", "\\|").replace("\n", " ")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _link(kind: str, text: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
