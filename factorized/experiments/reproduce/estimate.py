"""How long runs will take, from what past runs took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from factorized.experiments.recipes.shorten import length_of
from factorized.experiments.recipes.text import AnyRecipe
from factorized.experiments.reproduce.runs import Run


@dataclass(frozen=True)
class Estimate:
    """Seconds that a run will take, and the past runs that say so."""

    seconds: float
    basis: str
    device: str  # of those runs


def estimate(recipe: AnyRecipe, past: Sequence[Run], device: str) -> Estimate | None:
    """Return the time of a run on ``device``, by the median of the nearest past runs; None where none is near.

    Nearest first: runs of this recipe, of this network factorized alike, of this network, and of this network on other
    data; all on this device, then on others. Runs that shared their device count only if none of all these did not;
    of runs that took turns on it, each counts with its share.
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
                    shares = (run.result["seconds"] / run.at_once / (run.length or 1) for run in found)
                    shared = " (shared)" if any("note" in run.result for run in found) else ""
                    basis = f"{kind}, n = {len(found)}{shared}"
                    return Estimate(median(shares) * length_of(recipe), basis, where)
    return None


def _device(run: Run) -> str:
    return str(run.result["machine"].get("device"))


def _alike(run: Run, network: str, data: str) -> bool:
    return _network(run.recipe) == network and run.result["data"]["name"] == data


def _network(recipe: dict[str, Any]) -> str:
    """Return the network in words: its name, or the task and sizes of a transformer."""
    model = recipe.get("model", {})
    sizes = f"{recipe['task']} {model.get('hidden')}x{model.get('layers')}" if "task" in recipe else ""
    return str(model.get("name") or sizes)


def _scheme(recipe: dict[str, Any]) -> str:
    return str(recipe.get("factorize", {}).get("scheme", "none"))


def in_time(seconds: float) -> str:
    """Return a duration as people say it: "40 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
