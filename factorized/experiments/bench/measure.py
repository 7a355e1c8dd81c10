"""Interleaved timings with their spread, and the exponents that they grow by."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from factorized.nn.timing import cuda_milliseconds

Run = Callable[[], object]
FEWEST_ROUNDS, MOST_ROUNDS = 3, 101
PATIENCE = 10  # times the seconds asked for, after which one round is enough
PIECE = 0.02  # seconds of work between two looks at the clock of a GPU
SHORT = 1000  # milliseconds below which the caches of a CPU matter to a run: it follows another of its kind


@dataclass(frozen=True)
class Spread:
    """Milliseconds of several rounds."""

    median: float
    least: float
    largest: float
    rounds: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Spread:
        """Return the spread of these times, to four digits."""
        values = statistics.median(milliseconds), min(milliseconds), max(milliseconds)
        median, least, largest = (float(f"{value:.4g}") for value in values)
        return cls(median, least, largest, len(milliseconds))

    def to_dict(self) -> dict[str, float]:
        """Return the fields as plain data."""
        return asdict(self)


def clock_of(device: torch.device) -> str:
    """Return the name of the clock that times runs on ``device``.

    What one thread computed does not depend on other processes; with several threads only the wall clock says how long
    a user waits.
    """
    if device.type == "cuda":
        return "CUDA events"
    return "CPU time of one thread" if torch.get_num_threads() == 1 else "wall clock"


def interleave(runs: Mapping[str, Run], device: torch.device, seconds: float) -> dict[str, Spread]:
    """Time runs that are warm in turn, so that a busy moment hits them alike, for about ``seconds``.

    There are three rounds at least, or one where that alone takes ten times as long. On a GPU a short run is repeated
    between two looks at the clock. On a CPU it follows one that is not timed, because after other work the caches hold
    none of what it reads.
    """
    repeats = {name: _repeats(run, device) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for round_ in range(MOST_ROUNDS):
        spent = time.perf_counter() - began
        if (round_ >= FEWEST_ROUNDS and spent > seconds) or (round_ and spent > PATIENCE * seconds):
            break
        for name, run in runs.items():
            if device.type != "cuda" and times[name] and times[name][-1] < SHORT:
                run()
            times[name].append(milliseconds(run, device, repeats[name]))
    return {name: Spread.of(found) for name, found in times.items()}


def _repeats(run: Run, device: torch.device) -> int:
    """Return how often to call a run between two looks at the clock."""
    if device.type != "cuda":
        return 1
    return min(100, max(1, math.ceil(1e3 * PIECE / max(milliseconds(run, device), 1e-3))))


def milliseconds(run: Run, device: torch.device, repeats: int = 1) -> float:
    """Return the time of one run; on a GPU the mean of ``repeats``."""
    if device.type == "cuda":
        return cuda_milliseconds(run, repeats)
    read = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = read()
    run()
    return (read() - start) * 1e3


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the k of ``value = c · size^k`` that fits best: least squares in logarithms.

    Raises:
        ValueError: fewer than two different sizes, or a number that is not positive.
    """
    if len(sizes) != len(values) or len(set(sizes)) < 2 or min(*sizes, *values) <= 0:
        raise ValueError(f"expected positive values at two or more different sizes, got {sizes} and {values}")
    x, y = ([math.log(number) for number in numbers] for numbers in (sizes, values))
    return statistics.linear_regression(x, y).slope
