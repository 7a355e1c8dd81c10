"""Where a run differs from the shipped recipe that it names, and the folder of its results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.identity import RUNS, settings
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.reproduce.planned import OTHER_RUN

Changes = dict[str, tuple[Any, Any]]  # "section.field", with the recipe's value and the run's


def compare_settings(result: Mapping[str, Any], recipe: Recipe | TextRecipe) -> tuple[dict[str, Any], Changes]:
    """Return the settings that decided a run, and those in which it differs from ``recipe``.

    A run that it went on from is named by the end of its folder if the recipe says so, wherever that was; otherwise by
    its recipe, changes and seed.
    """
    ours, its = settings(recipe), settings(result["recipe"])
    began = result.get("from_run")
    for section, name in RUNS.items():
        told = OTHER_RUN.fullmatch(getattr(getattr(recipe, section), name, None) or "")
        key = f"{section}.{name}"
        folder = its.get(key)
        if told is not None and folder is not None and _is_run(folder, began, told, result["seed"]):
            ours[key] = folder
        elif name == "from_run" and folder is not None and began is not None:
            its[key] = _name(summarize(began))
    both = ((key, (ours.get(key), its.get(key))) for key in {**ours, **its})
    return its, {key: (expected, got) for key, (expected, got) in both if expected != got}


def summarize(began: Mapping[str, Any]) -> dict[str, Any]:
    """Return recipe, changes and seed of the run that another went on from."""
    if isinstance(began["recipe"], str):
        return {"recipe": began["recipe"], "changes": began.get("changes", []), "seed": began["seed"]}
    _, found = compare_settings(began, load_any_recipe(began["recipe"]["name"]))
    return {"recipe": began["recipe"]["name"], "changes": as_set(found), "seed": began["seed"]}


def as_set(changes: Changes) -> list[str]:
    """Return changes as ``--set`` takes them: ``section.field=value``."""
    return [f"{key}={got if isinstance(got, str) else json.dumps(got)}" for key, (_, got) in changes.items()]


def folder_of(recipe: str, changes: Sequence[str]) -> str:
    """Return the folder of a recipe's results with these changes: ``bert/small+decay.strength=0.03``."""
    return "+".join([recipe, *(change.replace("/", "~").replace("+", "~") for change in changes)])


def _is_run(folder: str, began: Mapping[str, Any] | None, told: re.Match[str], seed: int) -> bool:
    """Return whether a folder, and the run that was in it if that is known, is the one that a recipe names."""
    wanted = f"seed-{seed if told['seed'] == '{seed}' else told['seed']}"
    if began is not None and _name(summarize(began)) != f"{told['name']}/{wanted}":
        return False
    return re.fullmatch(rf"{re.escape(told['name'])}(-[0-9a-f]{{8}})?/{wanted}", folder) is not None


def _name(began: Mapping[str, Any]) -> str:
    return f"{folder_of(began['recipe'], began['changes'])}/seed-{began['seed']}"
