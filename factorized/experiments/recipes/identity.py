"""Which recipes train the same network: the fields that decide a run, and a fingerprint of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from factorized.experiments.models.names import MODELS
from factorized.experiments.recipes.find import check_any_recipe
from factorized.experiments.recipes.text import AnyRecipe

# Fields that do not decide what is learned beyond rounding. The checksum of the data stands for their names and files.
NOT_DECIDING: dict[str, tuple[str, ...]] = {
    "data": ("name", "place", "workers", "train", "validation", "test"),
    "factorize": ("execution",),
    "run": ("precision", "compile", "graph", "evaluate_every", "checkpoint_every", "diagnose", "accumulate"),
}
RUNS = {"model": "from_run", "decay": "norms"}  # fields that name the folder of another run


def deciding(recipe: AnyRecipe | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that decide what a recipe trains, as plain data; of the data of a recipe, defaults included.

    Data that are not a valid recipe, such as those of another version, are returned as they are.
    """
    table = _used(recipe if isinstance(recipe, Mapping) else recipe.to_dict())
    try:
        checked = check_any_recipe(table, "")
    except ValueError:
        return dict(table)
    found = _used(checked.model_dump(mode="json", exclude={"name", "title", "paper"}))
    for section, names in NOT_DECIDING.items():
        found[section] = {key: value for key, value in found[section].items() if key not in names}
    for section, name in RUNS.items():
        if found[section].get(name) is not None:  # NAME/seed-0, wherever the runs are
            found[section][name] = "/".join(Path(found[section][name]).parts[-3:])
    return found


def settings(recipe: AnyRecipe | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that decide what a recipe trains as ``section.field``, such as ``decay.strength``."""
    found: dict[str, Any] = {}
    for section, fields in deciding(recipe).items():
        if isinstance(fields, Mapping):
            found |= {f"{section}.{name}": value for name, value in fields.items()}
        else:
            found[section] = fields
    return found


def _used(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without the fields of [factorize] that its network does not use."""
    fields = dict(table.get("factorize") or {})
    if fields.get("scheme", "none") == "none":
        fields = {"scheme": "none"}
    elif (table.get("model") or {}).get("name") in MODELS:
        fields.pop("attention", None)  # those networks have none
    return {**table, "factorize": fields}


def fingerprint(recipe: AnyRecipe | Mapping[str, Any], checksum: str) -> str:
    """Return eight digits that differ for another recipe, or for other data, whose checksum is given."""
    told = json.dumps([deciding(recipe), checksum], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:8]
