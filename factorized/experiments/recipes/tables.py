"""The paper's tables as data: every figure of a table's file, and the recipe of every cell that can be trained."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from factorized.experiments.data.explain import rule

FIGURE = re.compile(r"([+-]?\d+(?:\.\d+)?)(?:±(\d+(?:\.\d+)?))?")
AIMS = {"accuracy": "accuracy", "F1": "f1"}  # metrics that recipes aim at, and their field of [paper]
NOTHING, NO_FIGURE = "-", "*"  # the table has nothing there; a recipe is there, and the paper has no figure for it
Settings = dict[str, Any]  # as in a recipe: the task of text; section, field, value


@dataclass(frozen=True)
class Cell:
    """One figure of a table of the paper, with its recipe where it can be trained."""

    table: int | None  # the paper's number, 5 to 9 in its appendix
    grid: str  # which part of the table
    metric: str  # "accuracy", "error" or another; empty where the column says it
    row: str
    column: str
    figure: float | None  # as it is printed; None where a recipe is not in the paper
    deviation: float | None
    source: str | None  # whose figure the paper quotes, by the paper's citation keys; None for its own
    recipe: str | None = None  # the recipe's name
    # the recipe's settings, each to be merged over those before it; none of a recipe that is defined elsewhere
    layers: tuple[Mapping[str, Any], ...] = ()

    @property
    def defines_recipe(self) -> bool:
        """Whether its recipe is its own; else it has none, or names one of another table or file."""
        return bool(self.layers)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Option(_Part):
    """What a row or a column adds to the recipes in it."""

    name: str | None = None  # in the recipe's name; the label unless given
    title: str | None = None  # in its title; the label unless given
    dense: bool = False  # the recipes here are those of the dense network
    quoted: str | None = None
    settings: Settings = {}


class _Grid(_Part):
    """Figures by row and column; with a name, a recipe for each that is the paper's own."""

    name: str | None = None
    title: str
    columns: list[str]
    table: int | None = None
    metric: str | None = None
    settings: Settings = {}
    rows: dict[str, str] = {}
    quoted: dict[str, dict[str, str]] = {}  # source, row, figures


class _Pattern(_Part):
    """The pattern of a recipe's name or title, with {grid}, {row} and {column} in it."""

    name: str = "{grid}"
    title: str = "{grid}"


class _Table(_Part):
    table: int | None = None  # None: recipes of ours, without a table of the paper
    metric: str = ""
    recipe: _Pattern = _Pattern()
    dense: _Pattern = _Pattern()
    settings: Settings = {}
    columns: dict[str, _Option] = {}
    rows: dict[str, _Option] = {}
    grid: list[_Grid] = []
    also: list[str] = []  # recipes that are defined elsewhere and belong to it too


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of a table's file in its order; a mistake in the file is a ``ValueError`` that says where."""
    try:
        table = _Table.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: not valid TOML: {error}") from None
    except ValidationError as error:
        told = (f"{'.'.join(map(str, e['loc']))}: {rule(e['msg'])}, got {e['input']!r}" for e in error.errors())
        raise ValueError(f"{path.name}: {'; '.join(told)}") from None
    cells = [cell for grid in table.grid for cell in _cells(table, grid, path.name)]
    cells += [Cell(None, "", "", name, "", None, None, None, recipe=name) for name in table.also]
    names = [cell.recipe for cell in cells if cell.recipe is not None]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path.name}: expected one cell for each recipe, got several for {', '.join(twice)}")
    return cells


def _cells(table: _Table, grid: _Grid, file: str) -> Iterator[Cell]:
    own = [(label, text, None) for label, text in grid.rows.items()]
    others = [(label, text, source) for source, rows in grid.quoted.items() for label, text in rows.items()]
    for label, text, source in (*own, *others):
        where = f"{file}: {grid.title}, row {label!r}"
        words = text.split()
        if len(words) != len(grid.columns):
            columns = ", ".join(grid.columns)
            raise ValueError(f"{where}: expected {len(grid.columns)} figures ({columns}), got {len(words)}: {text!r}")
        for column, word in zip(grid.columns, words, strict=True):
            if word != NOTHING:
                yield _cell(table, grid, label, column, word, source, where)


def _cell(table: _Table, grid: _Grid, label: str, column: str, word: str, source: str | None, where: str) -> Cell:
    where = f"{where}, column {column!r}"
    source = source or table.columns.get(column, _Option()).quoted
    trained = grid.name is not None and source is None
    read = FIGURE.fullmatch(word)
    if read is None and not (trained and word == NO_FIGURE):
        star = f", {NO_FIGURE} for a recipe without a figure" if trained else ""
        raise ValueError(f"{where}: expected a figure such as 93.75±0.48, {NOTHING} for nothing{star}; got {word!r}")
    cell = Cell(
        table=table.table if grid.table is None else grid.table,
        grid=grid.title,
        metric=table.metric if grid.metric is None else grid.metric,
        row=label,
        column=column,
        figure=float(read[1]) if read else None,
        deviation=float(read[2]) if read and read[2] else None,
        source=source,
    )
    return _with_recipe(cell, table, grid, where) if trained else cell


def _with_recipe(cell: Cell, table: _Table, grid: _Grid, where: str) -> Cell:
    for known, label, name in ((table.rows, cell.row, "rows"), (table.columns, cell.column, "columns")):
        if label not in known:
            raise ValueError(f"{where}: [{name}] does not say what {label!r} trains; it has {', '.join(known)}")
    row, column = table.rows[cell.row], table.columns[cell.column]
    dense = row.dense or column.dense
    pattern = table.dense if dense else table.recipe
    above: dict[str, Any] = {"title": _fill(pattern.title, grid.title, row.title, column.title, cell, where)}
    if cell.figure is not None:
        above["paper"] = {"table": cell.table, **_aim(cell, cell.figure, where), "deviation": cell.deviation}
    layers: list[Mapping[str, Any]] = [table.settings, grid.settings, row.settings, column.settings]
    if dense:
        layers = [{key: value for key, value in layer.items() if key != "factorize"} for layer in layers]
    layers = [
        _filled(layer, lambda text: _fill(text, grid.name or "", row.name, column.name, cell, where))
        for layer in layers
    ]
    name = _fill(pattern.name, grid.name or "", row.name, column.name, cell, where)
    return replace(cell, recipe=name, layers=(above, *layers))


def _filled(settings: Any, fill: Callable[[str], str]) -> Any:
    """Return settings with their words filled in, such as the name of the run that another one continues from."""
    if isinstance(settings, Mapping):
        return {key: _filled(value, fill) for key, value in settings.items()}
    return fill(settings) if isinstance(settings, str) and "{" in settings else settings


def _fill(pattern: str, grid: str, row: str | None, column: str | None, cell: Cell, where: str) -> str:
    words = {
        "grid": grid,
        "row": cell.row if row is None else row,
        "column": cell.column if column is None else column,
    }
    try:
        return pattern.format_map(words)
    except (KeyError, ValueError, IndexError, AttributeError):
        raise ValueError(
            f"{where}: expected a pattern with {{grid}}, {{row}} and {{column}} in it, and other braces twice, as "
            f"{{{{seed}}}}; got {pattern!r}"
        ) from None


def _aim(cell: Cell, figure: float, where: str) -> dict[str, float]:
    """Return the figure as the [paper] table of a recipe."""
    if cell.metric == "error":
        return {"accuracy": round(100 - figure, 6)}  # 100 - 7.62 is 92.38 but for rounding
    if cell.metric not in AIMS:
        known = ", ".join(f'"{metric}"' for metric in ("error", *AIMS))
        raise ValueError(f"{where}: recipes aim at one of {known}, got metric = {cell.metric!r}")
    return {AIMS[cell.metric]: figure}
