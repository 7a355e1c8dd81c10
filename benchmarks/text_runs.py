"""The results of runs on text, by recipe and settings, and their figures as the cells of a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.markdown import figure
from factorized.experiments.reproduce.changes import folder_of

Run = dict[str, Any]
RESULTS = Path(__file__).parent.parent / "results"
TATOEBA, BERT, DECODER, TINY = "translation/tatoeba", "bert/small", "language/small", "language/tiny"
STRENGTH, FROM_RUN = "decay.strength", "model.from_run"


@dataclass(frozen=True)
class Row:
    """The runs of one recipe with the same settings, one for each seed."""

    recipe: str
    changes: tuple[str, ...]  # settings that differ from the recipe, as --set takes them
    runs: tuple[Run, ...]

    @property
    def strength(self) -> float | None:
        """The strength of the decay; None where nothing is decayed."""
        decay = self.runs[0]["recipe"]["decay"]
        return None if decay["kind"] == "none" else decay["strength"]

    @property
    def others(self) -> tuple[str, ...]:
        """The changes, without that of the decay's strength and without the run it goes on from."""
        return tuple(c for c in self.changes if c.partition("=")[0] not in (STRENGTH, FROM_RUN))

    @property
    def series(self) -> tuple[str, ...]:
        """What rows share that differ by the strength of the decay alone."""
        return (self.recipe, *self.others)

    @property
    def name(self) -> str:
        """The recipe and the changes to it, as a cell."""
        return " ".join([f"`{self.recipe}`", *(f"`{change}`" for change in self.others)])

    @property
    def parameters(self) -> int:
        """The number of parameters in training."""
        return int(self.runs[0]["parameters"])

    @property
    def updates(self) -> int:
        """The number of updates."""
        return int(self.runs[0]["recipe"]["schedule"]["updates"])

    def scores(self, name: str) -> list[float]:
        """Return a score of every run that has it."""
        return [run["scores"][name] for run in self.runs if name in run["scores"]]

    def measured(self, name: str) -> list[float]:
        """Return a time or speed of every run that had its machine to itself, which is one without a note."""
        return [run[name] for run in self.runs if "note" not in run and run.get(name) is not None]

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return a column of the history by update, averaged over the runs."""
        columns = [{row["update"]: row[name] for row in run["history"] if name in row} for run in self.runs]
        shared = sorted(set.intersection(*(set(column) for column in columns)))
        return [(update, mean(column[update] for column in columns)) for update in shared]


def read_rows(task: str, results: Path = RESULTS) -> list[Row]:
    """Return the results of one task, sorted by recipe, then strength of the decay."""
    found: dict[tuple[str, tuple[str, ...]], list[Run]] = {}
    for path in sorted(results.glob("*/*/seed-*.json")):
        run = json.loads(path.read_text())
        if run.get("task") == task:
            found.setdefault((run["recipe"]["name"], _settings(run)), []).append(run)
    rows = [Row(recipe, changes, tuple(runs)) for (recipe, changes), runs in found.items()]
    return sorted(rows, key=lambda row: (row.series, row.strength or 0.0))


def _settings(run: Run) -> tuple[str, ...]:
    """Return the changes of a run. The run that it goes on from is named without its seed."""
    own = [change for change in run.get("changes", ()) if not change.startswith(FROM_RUN)]
    began = run.get("from_run")
    return (*([f"{FROM_RUN}={folder_of(began['recipe'], began['changes'])}"] if began else []), *own)


def rows_of(task: str, recipe: str, results: Path) -> list[Row]:
    """Return the rows of a task whose recipe is ``recipe``, or that with a suffix."""
    return [row for row in read_rows(task, results) if row.recipe == recipe or row.recipe.startswith(f"{recipe}-")]


def by_series(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows grouped by what they share apart from the strength, in their order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.series, []).append(row)
    return found


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have the same changes, apart from the strength: those that most rows have."""
    common = [others for others, _ in Counter(row.others for row in rows).most_common(1)]
    return [row for row in rows if row.others in common]


def lowest(rows: Sequence[Row], score: str) -> Row:
    """Return the row with the lowest mean of a score."""
    return min(rows, key=lambda row: mean(row.scores(score)))


def speed(rows: Sequence[Row]) -> str:
    """Return the tokens per second of all runs of some rows."""
    return figure([value for row in rows for value in row.measured("tokens_per_second")], 0)


def strength(row: Row) -> str:
    """Return the strength of a row's decay as a cell."""
    return "–" if row.strength is None else f"{row.strength:g}"


def memory(row: Row) -> str:
    """Return the peak memory of a row in GiB."""
    peak = [run["peak_memory"] for run in row.runs if run["peak_memory"] is not None]
    return f"{max(peak) / 2**30:.2f}" if peak else "–"


def machines(rows: Sequence[Row]) -> str:
    """Return the hardware and versions of all runs."""
    runs = [run["machine"] for row in rows for run in row.runs]
    return "; ".join(sorted({f"{m['device']}, torch {m['torch']}, transformers {m['transformers']}" for m in runs}))


def missing(expected: dict[str, int], rows: Sequence[Row]) -> str:
    """Return which recipes have no run, or runs at fewer strengths than expected, as a sentence."""
    lacking = []
    for recipe, wanted in expected.items():
        held = len({row.strength for row in comparable(rows) if row.recipe == recipe})
        if held < wanted:
            more = "more " if held else ""
            count = f" at {wanted - held} {more}strength{'s' if wanted - held > 1 else ''}" if wanted > 1 else ""
            lacking.append(f"`{recipe}`{count}")
    return f"Missing: {', '.join(lacking)}." if lacking else "Nothing is missing."


def block(body: str, rows: Sequence[object], *below: str) -> str:
    """Return a table with the sentences below it; no table where there are no rows."""
    return "\n\n".join([*([body] if rows else []), *(sentence for sentence in below if sentence)])
