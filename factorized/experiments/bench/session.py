"""``Session``: one benchmark on one device, whose JSON file is written after every group of rows."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from factorized.experiments.bench.measure import Run, clock_of, interleave
from factorized.experiments.bench.memory import PeakMemory
from factorized.experiments.training.record import describe_machine
from factorized.files.atomic import write_text

Row = dict[str, Any]
# whose versions a report has, where installed
PEERS = ("transformers", "tensorly-torch", "tensorly", "opt_einsum", "peft")


@dataclass(frozen=True)
class Way:
    """One of several ways that do the same job: what is timed, and what else is known of it."""

    run: Run
    facts: Row = field(default_factory=dict)


Make = Callable[[], Way]


class Session:
    """One benchmark on one device: measures groups of ways side by side and keeps their rows in a file.

    Rows of a group are compared with its first way, which is the one to beat.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        device: torch.device,
        seconds: float = 10,
        only: str = "",
        say: Callable[[str], object] = print,
    ) -> None:
        self.name, self.path, self.device, self.seconds, self.only, self.say = name, path, device, seconds, only, say
        self.rows: list[Row] = []
        self.fits: list[Row] = []
        self.skipped: list[str] = []
        self.unwanted: list[str] = []  # names of rows that ``only`` leaves out
        self.began = time.perf_counter()
        self.machine = {**describe_machine(device), "packages": _versions()}

    @property
    def is_cuda(self) -> bool:
        """Whether this is a GPU, for which sizes are larger."""
        return self.device.type == "cuda"

    def wants(self, group: str, way: str) -> bool:
        """Return whether ``only`` leaves this row in."""
        if self.only in (name := f"{group}: {way}"):
            return True
        self.unwanted.append(name)
        return False

    def compare(
        self,
        group: str,
        makers: Mapping[str, Make],
        peers: Mapping[str, Make] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Time ways of doing one job side by side, each with its peak memory, and write a row for each.

        A way that does not fit into memory, or one of another package, among ``peers``, that fails is skipped with its
        message. Others raise.
        """
        if self.is_cuda:
            torch.compiler.reset()  # code of other groups counts towards the limit of recompilations
            torch.backends.cudnn.benchmark = True  # as in training: cuDNN's guesses are slower
        ways: dict[str, Way] = {}
        for name, make in {**makers, **(peers or {})}.items():
            if not self.wants(group, name):
                continue
            try:
                ways[name] = self._warm(make)
            except Exception as error:
                if name in makers and not isinstance(error, torch.OutOfMemoryError):
                    raise
                self.skip(f"{group}: {name}", f"{type(error).__name__}: {error}")
        if not ways:
            return
        times = interleave({name: way.run for name, way in ways.items()}, self.device, seconds or self.seconds)
        first = next(iter(makers))
        for name, way in ways.items():
            row = {"group": group, "way": name, "ms": times[name].to_dict(), **way.facts}
            if first in ways:
                row["over"] = _share(times[name].median, times[first].median)
                row["memory_over"] = _share(way.facts["memory"], ways[first].facts["memory"])
            self.rows.append(row)
        self.write()
        self.tell(group)

    def _warm(self, make: Make) -> Way:
        """Make a way and run it twice; memory is that of the second time, with what the way holds between runs."""
        began = time.perf_counter()
        with PeakMemory(self.device) as memory:
            way = make()
            way.run()
            memory.restart()
            way.run()
        seconds = round(time.perf_counter() - began, 2)
        return Way(way.run, {**way.facts, "memory": memory.bytes, "start_seconds": seconds})

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows that were measured elsewhere."""
        self.rows += rows
        self.write()

    def skip(self, what: str, why: str) -> None:
        """Write and say that something was not measured."""
        if (line := f"{what}: {why}") not in self.skipped:
            self.skipped.append(line)
        self.say(f"  not measured: {what}: {why}")
        self.write()

    def tell(self, group: str) -> None:
        """Print the rows of a group as a table."""
        rows = [row for row in self.rows if row["group"] == group]
        lines = [("", "ms", "range", "of the first", "MiB"), *map(_cells, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.say(f"{group} (n = {rows[0]['ms']['rounds']})")
        for name, *figures in lines:
            right = "  ".join(figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True))
            self.say(f"  {name.ljust(widths[0])}  {right}")

    def write(self) -> None:
        """Write everything so far."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, text)

    def to_dict(self) -> Row:
        """Return the report as plain data."""
        return {
            "benchmark": self.name,
            "machine": self.machine,
            "clock": clock_of(self.device),
            "seconds": round(time.perf_counter() - self.began, 1),
            "rows": self.rows,
            "fits": self.fits,
            "skipped": self.skipped,
        }


def _cells(row: Row) -> tuple[str, ...]:
    """Return the name of a row's way, its time, range, time over the first way's, and memory."""
    spread = row["ms"]
    over = f"{row['over']:.2f}" if row.get("over") is not None else ""
    memory = f"{row['memory'] / 2**20:,.1f}" if row.get("memory") is not None else ""
    return row["way"], f"{spread['median']:g}", f"{spread['least']:g} to {spread['largest']:g}", over, memory


def _share(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else round(value / of, 4)


def _versions() -> dict[str, str]:
    found = {}
    for package in PEERS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
