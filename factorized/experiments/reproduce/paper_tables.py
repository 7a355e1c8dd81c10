"""The tables of a report that show the paper's figures: beside ours, as the paper prints them, and those missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from factorized.experiments.recipes.find import paper_cells
from factorized.experiments.recipes.tables import Cell
from factorized.experiments.reproduce.compare import BAND, TRIALS, Comparison
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.table import Column, Columns, Table, Value
from factorized.experiments.reproduce.tables import mixed
from factorized.experiments.reproduce.values import count_value, mean_value, signed_value, slug_of

DASH = "–"
CELL = Column("cell", parts=("recipe", "network and data", "method", "column"))
PAPER = Column("paper", number=True, parts=("paper", "paper deviation"))


def paper_table(comparisons: Sequence[Comparison]) -> Table:
    """Return the paper's figures beside ours, one row for each that was trained."""
    columns: Columns[Comparison] = [
        (CELL, _trained_cell),
        (PAPER, lambda c: mean_value(c.paper)),
        (Column("ours", number=True, parts=("ours", "ours deviation")), lambda c: mean_value(c.ours)),
        (Column("n", number=True), lambda c: count_value(c.ours)),
        (Column("difference", number=True), lambda c: signed_value(c.difference)),
        (Column("in deviations", number=True), lambda c: signed_value(c.in_deviations, c.verdict)),
        (Column("by chance", number=True), _chance_value),
        (Column("verdict"), lambda c: Value(_verdict(c), (c.verdict,), tone=_tone(c))),
        (Column("metric"), lambda c: Value(c.cell.metric)),
        (Column("table", number=True), lambda c: Value(str(c.cell.table), (c.cell.table,))),
    ]
    trained = [found for found in comparisons if found.variant is not None]
    note = (
        f"The paper's figures are means of three trials. A figure is within the band if it is at most {BAND:g} of the "
        "paper's deviations away. “By chance” is the probability of a difference at least as large if only seeds "
        "differed (by Student's t, as the paper's deviations are of three trials). Shortened and changed runs are not "
        "judged."
    )
    return Table.of("paper", "The paper and ours", trained, columns, note, list(map(_tone, trained)))


def _trained_cell(found: Comparison) -> Value:
    cell, variant = found.cell, found.variant
    assert variant is not None  # it was trained
    raw = (variant.name, cell.grid, cell.row, cell.column)
    return Value(variant.label, raw, small=_place(cell), chips=mixed(variant))


def _chance_value(found: Comparison) -> Value:
    return Value("" if found.chance is None else f"{found.chance:.2f}", (found.chance,))


def _tone(found: Comparison) -> str:
    return found.verdict.replace(" ", "-")


def _place(cell: Cell) -> str:
    return f"{cell.grid}: {cell.row}, {cell.column}"


def grid_tables(comparisons: Sequence[Comparison]) -> list[Table]:
    """Return the parts of the paper's tables as the paper prints them, with ours above each figure."""
    trained: dict[str | None, Comparison] = {}
    for found in comparisons:  # where a recipe was also trained shorter, the whole run is shown
        known = trained.get(found.cell.recipe)
        if known is None or (found.variant is not None and found.variant.comparable):
            trained[found.cell.recipe] = found
    wanted = {(c.cell.table, c.cell.grid, c.cell.metric) for c in comparisons if c.variant is not None}
    return [
        _grid_table(place, list(cells), trained)
        for place, cells in groupby(paper_cells(), key=lambda cell: (cell.table, cell.grid, cell.metric))
        if place in wanted
    ]


def _grid_table(
    place: tuple[int | None, str, str], cells: Sequence[Cell], trained: Mapping[str | None, Comparison]
) -> Table:
    number, grid, metric = place
    names = list(dict.fromkeys(cell.column for cell in cells))
    by_row: dict[tuple[str, str | None], dict[str, Cell]] = {}
    for cell in cells:
        by_row.setdefault((cell.row, cell.source), {})[cell.column] = cell
    parts = ("ours", "ours deviation", "n", "verdict", "paper", "paper deviation")
    method = Column("method", parts=("method", "quoted from"))
    columns = [method, *(Column(n, number=True, parts=tuple(f"{n} {part}" for part in parts)) for n in names)]
    rows, tones = [], []
    for (label, source), found in by_row.items():
        cited = f"quoted from {source}" if source is not None else ""
        row = [Value(label, (label, source), small=cited)]
        for name in names:
            row.append(_grid_value(found.get(name), trained))
        rows.append(row)
        tones.append("quoted" if cited else "")
    better = "lower" if metric == "error" else "higher"
    note = f"Ours above the paper's; test {metric} in percent, {better} is better. {DASH}: not trained."
    return Table(slug_of(f"table-{number}-{grid}"), f"Table {number}: {grid}", columns, rows, note, tones)


def _grid_value(cell: Cell | None, trained: Mapping[str | None, Comparison]) -> Value:
    if cell is None:
        return Value("", (None,))
    printed = "" if cell.figure is None else str(Summary(cell.figure, cell.deviation, TRIALS))
    beside = printed and f"paper {printed}"
    found = trained.get(cell.recipe) if cell.recipe is not None else None
    if found is None:  # a figure of others
        return Value(printed, (None, None, None, None, cell.figure, cell.deviation))
    ours = found.ours
    if ours is None:
        return Value(DASH, (None, None, 0, found.verdict, cell.figure, cell.deviation), small=beside, tone="missing")
    chips = ("shortened",) if found.verdict == "shortened" else ("changed",) if found.verdict == "changed" else ()
    best = "best of its size" in (found.variant.marks if found.variant is not None else ())
    raw = (ours.mean, ours.deviation, ours.n, found.verdict, cell.figure, cell.deviation)
    small = ", ".join(filter(None, (f"n = {ours.n}", beside)))
    return Value(str(ours), raw, small, found.verdict, (*chips, *(("best of its size",) if best else ())))


def missing_table(comparisons: Sequence[Comparison]) -> Table:
    """Return the figures of the same tables that are not trained yet, with the command that trains them."""
    columns: Columns[Comparison] = [
        (CELL, lambda c: Value(_place(c.cell), (c.cell.recipe, c.cell.grid, c.cell.row, c.cell.column))),
        (PAPER, lambda c: mean_value(c.paper)),
        (Column("table", number=True), lambda c: Value(str(c.cell.table), (c.cell.table,))),
        (Column("command"), lambda c: Value(f"factorized train {c.cell.recipe} --data DIR --seeds 3")),
    ]
    return Table.of("missing", "Missing", [found for found in comparisons if found.variant is None], columns)


def _verdict(found: Comparison) -> str:
    told = found.variant.shortened if found.variant is not None and found.verdict == "shortened" else ""
    return f"{found.verdict}{f': {told}' if told else ''}"
