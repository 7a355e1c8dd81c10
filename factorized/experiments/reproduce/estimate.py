"""How long runs will take, from what past runs took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from factorized.experiments.data.known import KNOWN
from factorized.experiments.recipes.shorten import length_of
from factorized.experiments.recipes.text import AnyRecipe
from factorized.experiments.reproduce.runs import Run


@dataclass(frozen=True)
class Estimate:
    """The estimated seconds of a run, and the past runs that the estimate is based on."""

    seconds: float
    basis: str
    device: str  # of those runs


def estimate(recipe: AnyRecipe, past: Sequence[Run], device: str) -> Estimate | None:
    """Return the time of a run on ``device``, by the median of the nearest past runs; None where none is near.

    Nearest first: runs of this recipe, of this network factorized alike, of this network, and of this network on other
    data; all on this device, then on others. Runs that shared their device count only if none of all these did not;
    of runs that took turns on it, each counts with its share. Times on other images are scaled by images × pixels,
    where both sets are the paper's.
    """
    table = recipe.to_dict()
    network, scheme, data = _network(table), _scheme(table), table["data"]["name"]
    kinds: tuple[tuple[str, Callable[[Run], bool]], ...] = (
        ("this recipe", lambda run: run.name == recipe.name),
        (f"{network}, {scheme}", lambda run: _alike(run, network, data) and _scheme(run.recipe) == scheme),
        (network, lambda run: _alike(run, network, data)),
        (f"{network} on other data", lambda run: _network(run.recipe) == network),
    )
    measured = [run for run in past if run.length]
    devices = dict.fromkeys([device, *(_device(run) for run in measured)])
    for where in devices:
        there = [run for run in measured if _device(run) == where]
        for runs in ([run for run in there if run.timed], there):
            for kind, fits in kinds:
                found = [run for run in runs if fits(run)]
                if found:
                    return Estimate(_median(found, data) * length_of(recipe), _basis(kind, found, data), where)
    return None


def _median(runs: Sequence[Run], data: str) -> float:
    """Return the seconds of an epoch or update on ``data``."""
    return median(_work(data, run) * run.result["seconds"] / run.at_once / (run.length or 1) for run in runs)


def _basis(kind: str, runs: Sequence[Run], data: str) -> str:
    work = sorted({_work(data, run) for run in runs})
    scaled = "" if work == [1] else f", {'/'.join(f'{times:g}' for times in work)}× pixels"
    shared = "" if all(run.timed for run in runs) else " (shared)"
    return f"{kind}{scaled}, n = {len(runs)}{shared}"


def _work(data: str, run: Run) -> float:
    """Return the work of an epoch on ``data`` over that of an epoch of ``run``; 1 where it is not known."""
    ours, theirs = (KNOWN.get(name) for name in (data, run.result["data"]["name"]))
    return 1 if ours is None or theirs is None else ours.pixels / theirs.pixels


def _device(run: Run) -> str:
    return str(run.result["machine"].get("device"))


def _alike(run: Run, network: str, data: str) -> bool:
    return _network(run.recipe) == network and run.result["data"]["name"] == data


def _network(recipe: dict[str, Any]) -> str:
    """Return the network in words: its name, or the task of a transformer with its sizes or the run it is from."""
    model = recipe.get("model", {})
    if model.get("name") or "task" not in recipe:
        return str(model.get("name", ""))
    run = model.get("from_run")  # whose sizes it has, not those of this recipe
    return f"{recipe['task']} from {run}" if run else f"{recipe['task']} {model.get('hidden')}x{model.get('layers')}"


def _scheme(recipe: dict[str, Any]) -> str:
    return str(recipe.get("factorize", {}).get("scheme", "none"))


def in_time(seconds: float) -> str:
    """Return a duration in words: "40 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
