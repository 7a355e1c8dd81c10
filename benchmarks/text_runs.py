"""The results of runs on text, by recipe and settings, and their figures as the cells of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.markdown import figure
from factorized.experiments.reproduce.changes import folder_of
from factorized.experiments.reproduce.runs import Run, read_run
from factorized.experiments.reproduce.variant import Variant

RESULTS = Path(__file__).parent.parent / "results"
TATOEBA, BERT, DECODER, TINY = "translation/tatoeba", "bert/small", "language/small", "language/tiny"
STRENGTH, FROM_RUN = "decay.strength", "model.from_run"


class Row(Variant):
    """The runs of one recipe with the same changes to it, one for each seed, as a row of a table."""

    @property
    def strength(self) -> float | None:
        """The strength of the decay; None where nothing is decayed."""
        decay = self.recipe["decay"]
        return None if decay["kind"] == "none" else decay["strength"]

    @property
    def others(self) -> tuple[str, ...]:
        """The changes, without that of the decay's strength and without the run it goes on from."""
        return tuple(f"{key}={value}" for key, value in self.changes.items() if key not in (STRENGTH, FROM_RUN))

    @property
    def series(self) -> tuple[str, ...]:
        """What rows share that differ by the strength of the decay alone."""
        return (self.name, *self.others)

    @property
    def cell(self) -> str:
        """The recipe and the changes to it."""
        return " ".join(f"`{part}`" for part in self.series)

    @property
    def folder(self) -> str:
        """The folder of its results."""
        return folder_of(self.name, [f"{key}={value}" for key, value in self.changes.items()])

    def scores(self, name: str) -> list[float]:
        """Return a score of every run that has it."""
        return [score for run in self.runs if (score := run.figure(name)) is not None]

    def measured(self, name: str) -> list[float]:
        """Return a time or speed of every run that had its machine to itself."""
        return [run.result[name] for run in self.runs if run.timed and run.result.get(name) is not None]


def read_rows(task: str, results: Path = RESULTS) -> list[Row]:
    """Return the results of one task, sorted by recipe, then strength of the decay."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for path in sorted(results.glob("*/*/seed-*.json")):
        run = read_run(path)
        if run.result.get("task") == task:
            found.setdefault((run.name, *map("=".join, _changes(run).items())), []).append(run)
    rows = [Row(runs, runs[0].name, _changes(runs[0])) for runs in found.values()]
    return sorted(rows, key=lambda row: (row.series, row.strength or 0.0))


def _changes(run: Run) -> dict[str, str]:
    """Return the changes of a run. The run that it goes on from is named without its seed."""
    began = run.result.get("from_run")
    own = dict(change.split("=", 1) for change in run.result.get("changes", ()))
    before = {FROM_RUN: folder_of(began["recipe"], began["changes"])} if began else {}
    return {**before, **{key: value for key, value in own.items() if key != FROM_RUN}}


def rows_of(task: str, recipe: str, results: Path) -> list[Row]:
    """Return the rows of a task whose recipe is ``recipe``, or that with a suffix."""
    return [row for row in read_rows(task, results) if row.name == recipe or row.name.startswith(f"{recipe}-")]


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
    peak = [run.result["peak_memory"] for run in row.runs if run.result["peak_memory"] is not None]
    return f"{max(peak) / 2**30:.2f}" if peak else "–"


def machines(rows: Sequence[Row]) -> str:
    """Return the hardware and versions of all runs."""
    found = [run.result["machine"] for row in rows for run in row.runs]
    return "; ".join(sorted({f"{m['device']}, torch {m['torch']}, transformers {m['transformers']}" for m in found}))


def missing(expected: dict[str, int], rows: Sequence[Row]) -> str:
    """Return which recipes have no run, or runs at fewer strengths than expected, as a sentence."""
    lacking = []
    for recipe, wanted in expected.items():
        held = len({row.strength for row in comparable(rows) if row.name == recipe})
        if held < wanted:
            more = "more " if held else ""
            count = f" at {wanted - held} {more}strength{'s' if wanted - held > 1 else ''}" if wanted > 1 else ""
            lacking.append(f"`{recipe}`{count}")
    return f"Missing: {', '.join(lacking)}." if lacking else "Nothing is missing."


def block(body: str, rows: Sequence[object], *below: str) -> str:
    """Return a table with the sentences below it; no table where there are no rows."""
    return "\n\n".join([*([body] if rows else []), *(sentence for sentence in below if sentence)])
