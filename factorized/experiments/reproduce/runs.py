"""Runs read from their result files, on images and on text alike; a file that cannot be read is named and left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factorized.experiments.recipes.identity import RUNS, settings
from factorized.experiments.training.folder import BEGUN, COMPRESSION, FAILURE, METRICS
from factorized.experiments.training.result import RESULT, Result, read_result_file

NAMES = {"accuracy": "accuracy, %", "bleu": "BLEU", "f1": "F1"}


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run, read from its file, with the same properties for images and text."""

    path: Path
    result: Result

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that decided it."""
        recipe: dict[str, Any] = self.result["recipe"]
        return recipe

    @property
    def name(self) -> str:
        """The name of its recipe."""
        return str(self.recipe["name"])

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.result["seed"])

    @property
    def metric(self) -> str:
        """The name of its score: "accuracy", "bleu", "perplexity", "loss" or "f1"."""
        return str(self.result.get("score", "accuracy"))

    @property
    def score(self) -> float:
        """Its figure: of the test images after the last epoch, or of the text it was not trained on."""
        return self.figure(self.metric) or 0.0

    def figure(self, metric: str) -> float | None:
        """Return a figure of the trained network by name; None where the run did not measure it."""
        if "scores" not in self.result:
            return float(self.result["accuracy"]) if metric == "accuracy" else None
        value = self.result["scores"].get(metric)
        return float(value) if isinstance(value, int | float) else None

    @property
    def by(self) -> str:
        """The unit of its history: "epoch" or "update"."""
        return "update" if "scores" in self.result else "epoch"

    @property
    def length(self) -> int | None:
        """How many epochs or updates it took, as its recipe says."""
        return self.recipe.get("schedule", {}).get(f"{self.by}s")

    @property
    def at_once(self) -> int:
        """How many runs took turns on its device, itself included."""
        return int(self.result["machine"].get("runs_at_once", 1))

    @property
    def timed(self) -> bool:
        """Whether it had its device to itself, so that its seconds can be compared; a note says that it did not."""
        return "note" not in self.result and self.at_once == 1


@dataclass(frozen=True)
class LeftOut:
    """A file that is left out of a report, and why."""

    path: Path
    why: str
    is_copy: bool = False  # of a run that is on the page


@dataclass(frozen=True)
class Unfinished:
    """A run without a result: its folder, how far it came, and the error that ended it if one is known."""

    path: Path
    reached: str
    error: str | None


@dataclass
class Found:
    """The runs found in files and folders."""

    runs: list[Run] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)


def read_runs(places: Iterable[Path]) -> Found:
    """Return the runs in these files and folders; every other JSON file there is named with the reason, none deleted.

    In a folder, results are looked for at any depth: ``result.json`` of a run, and JSON files of any name outside of
    runs. What else is in the folders of runs and of compressed networks, and what ``factorized bench`` wrote, is passed
    over in silence. A run that is there twice counts once.
    """
    found, seen = Found(), dict[str, Path]()
    for place in places:
        if not place.exists():
            raise ValueError(f"there is no file or folder {place}; give results, such as out/ or results/")
        for path in _result_files(place):
            try:
                run = read_run(path)
            except ValueError as error:
                if place.is_file() or not _is_of_bench(path):
                    found.left_out.append(LeftOut(path, str(error)))
                continue
            known = seen.setdefault(_identity(run), path)
            if known is path:
                found.runs.append(run)
            elif known.resolve() != path.resolve():
                found.left_out.append(LeftOut(path, f"the same run as {known}", is_copy=True))
        if place.is_dir():
            found.unfinished += _unfinished(place)
    return found


def read_run(path: Path) -> Run:
    """Return the run of a result file; a ``ValueError`` says what is wrong with it."""
    return Run(path, read_result_file(path))


def _identity(run: Run) -> str:
    """Return what two files share that hold one run: its settings, and the losses of every epoch to the last digit.

    Another setting, such as a strength of 0, need not change any loss. Folders of other runs are on one machine.
    """
    folders = {f"{section}.{name}" for section, name in RUNS.items()}
    decided = {key: value for key, value in settings(run.recipe).items() if key not in folders}
    losses = [row.get("loss") for row in run.result["history"]]
    told = [run.name, run.seed, run.result["data"]["checksum"], run.score, losses, decided]
    return json.dumps(told, sort_keys=True)


def _result_files(place: Path) -> Iterator[Path]:
    """Yield what may be results, in natural order: seed-2 before seed-10."""
    if place.is_file():
        yield place
        return
    runs = {path.parent for name in (RESULT, METRICS, BEGUN, FAILURE, COMPRESSION) for path in place.rglob(name)}
    for path in sorted(place.rglob("*.json"), key=_natural_order):
        above = [folder for folder in path.parents if folder in runs]
        if path.name == RESULT or not above:
            yield path


def _is_of_bench(path: Path) -> bool:
    """Return whether ``factorized bench`` wrote a file, by default beside the runs."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"benchmark", "clock", "rows"} <= found.keys()


def _unfinished(place: Path) -> Iterator[Unfinished]:
    begun = {path.parent for name in (METRICS, BEGUN, FAILURE) for path in place.rglob(name)}
    for folder in sorted(begun, key=_natural_order):
        if not (folder / RESULT).exists():
            yield Unfinished(folder, _reached(folder / METRICS), _error(folder / FAILURE))


def _reached(metrics: Path) -> str:
    """Return the last epoch or update in a file of metrics, of which a killed process may have left half a line."""
    try:
        rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
        by = next(name for name in ("epoch", "update") if name in rows[-1])
        return f"{by} {rows[-1][by]}"
    except (OSError, ValueError, LookupError, StopIteration, TypeError):
        return "nothing recorded"


def _error(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_text())["error"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"{path.name} cannot be read"


def _natural_order(path: Path) -> list[list[tuple[str, int]]]:
    return [[(word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", part)] for part in path.parts]
