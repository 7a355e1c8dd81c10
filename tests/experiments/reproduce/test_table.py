"""A table is the same as HTML, CSV and Markdown."""

from __future__ import annotations

import base64
import csv
import io

import pytest

from factorized.experiments.reproduce.table import Column, Table, Value


def table() -> Table:
    return Table(
        "some",
        "Some figures",
        (Column("name"), Column("ours", number=True, parts=("ours", "deviation"))),
        [
            (Value("a|b", small="c", chips=("best",)), Value("94.34 ± 0.05", (94.33999, 0.0491))),
            (Value("=1+1"), Value("", (None, None))),
        ],
        note="A note.",
    )


def test_csv_has_every_digit_and_a_column_for_each_part() -> None:
    rows = list(csv.reader(io.StringIO(table().to_csv())))
    assert rows[0] == ["name", "ours", "deviation"]
    assert rows[1] == ["a|b", "94.33999", "0.0491"]


def test_a_spreadsheet_computes_nothing_from_the_csv() -> None:
    assert table().to_csv().splitlines()[2] == "'=1+1,,"


def test_markdown_is_what_the_page_shows() -> None:
    lines = table().to_markdown().splitlines()
    assert lines[:5] == [
        "## Some figures",
        "",
        "| name | ours |",
        "| --- | ---: |",
        "| a\\|b (c) best | 94.34 ± 0.05 |",
    ]
    assert lines[-1] == "A note."


def test_links_hold_the_files_themselves() -> None:
    kind, _, data = table().csv_link.partition(";base64,")
    assert kind == "data:text/csv;charset=utf-8"
    assert base64.b64decode(data).decode() == table().to_csv()


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="some: expected 1 cells, got 2"):
        Table("some", "", (Column("a"),), [(Value("1"), Value("2"))])
