"""Results of runs that nobody trained, for pages about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.reproduce.runs import Run
from factorized.files.checksum import sealed

MACHINE = {"device": "some <GPU>", "torch": "2.13.0", "factorized": "0.1.0", "commit": "a" * 40, "processes": 1}
SHAPE = {"classes": ["a"], "channels": 1, "size": [8, 8]}
LAYER = {
    "name": "layer1.0.conv1",
    "kind": "conv",
    "format": "product",
    "shape": [16, 16, 3, 3],
    "rank": "4",
    "params": 384,
    "dense_params": 2304,
    "frobenius": 1.25,
    "spectral": 0.75,
    "nuclear": 2.5,
    "nuclear_bound": 3.0,
    "stable_rank": 2.0,
}


def image_result(name: str, seed: int, accuracy: float, *changes: str, **fields: Any) -> dict[str, Any]:
    """Return the result of a recipe of images whose accuracy climbs from a tenth of what it reaches."""
    recipe = load_any_recipe(name, changes)
    epochs = [1, 2, 3, 4]
    history = [
        {"epoch": e, "loss": 2.0 / e**2 + seed / 100, "test_accuracy": accuracy * (0.1 + 0.3 * (e - 1)), **PRODUCTS[e]}
        for e in epochs
    ]
    return {
        "recipe": recipe.to_dict(),
        "seed": seed,
        "accuracy": accuracy,
        "parameters": 7466,
        "seconds": 4.0,
        "machine": MACHINE,
        "data": {**SHAPE, "name": recipe.data.name, "checksum": f"sha-of-{recipe.data.name}"},
        "history": history,
        **fields,
    }


PRODUCTS = {epoch: {"nuclear": 10.0 + epoch, "nuclear_bound": 12.0 + 2 * epoch} for epoch in (1, 2, 3, 4)}


def text_result(name: str, seed: int, score: str, value: float, *changes: str, **fields: Any) -> dict[str, Any]:
    """Return the result of a recipe of text."""
    recipe = load_any_recipe(name, changes)
    history = [
        *({"update": update, "loss": 5.0 / update} for update in (10, 20, 30, 40)),
        *({"update": update, "validation_loss": 6.0 / update, score: 100 / update} for update in (20, 40)),
    ]
    return {
        "task": recipe.to_dict()["task"],
        "recipe": recipe.to_dict(),
        "seed": seed,
        "score": score,
        "scores": {score: value, "signature": "of a metric"},
        "parameters": 12_345,
        "seconds": 9.5,
        "machine": MACHINE,
        "data": {"name": recipe.data.name, "checksum": "sha-of-text"},
        "history": history,
        **fields,
    }


def run_of(result: dict[str, Any]) -> Run:
    """Return a result as a run that was read from a file."""
    return Run(Path(f"{result['recipe']['name']}/seed-{result['seed']}/result.json"), result)


def write(folder: Path, *results: dict[str, Any]) -> Path:
    """Write results as their runs do, and return the folder."""
    for result in results:
        path = folder / result["recipe"]["name"] / f"seed-{result['seed']}" / "result.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sealed(result)))
    return folder
