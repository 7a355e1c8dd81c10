"""Differences between a run and the shipped recipe that it names, and the folder of its results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.identity import RUNS, settings
from factorized.experiments.recipes.shorten import shorten, unit_of
from factorized.experiments.recipes.text import AnyRecipe
from factorized.experiments.reproduce.planned import OTHER_RUN

Changes = dict[str, tuple[Any, Any]]  # "section.field", with the recipe's value and the run's


def recipe_of(result: Mapping[str, Any]) -> AnyRecipe:
    """Return the shipped recipe that a run names, shortened as the run was."""
    recipe = load_any_recipe(result["recipe"]["name"])
    length = result["recipe"].get("schedule", {}).get(unit_of(recipe))
    return shorten(recipe, length) if _is_shortened(result) and isinstance(length, int) else recipe


def compare_settings(result: Mapping[str, Any], recipe: AnyRecipe) -> tuple[dict[str, Any], Changes]:
    """Return the settings that decided a run, and those in which it differs from ``recipe``.

    A run that it continued from is named by the end of its folder if the recipe names that run, and otherwise by its
    recipe, changes and seed.
    """
    ours, its = settings(recipe), settings(result["recipe"])
    began = result.get("from_run")
    for section, name in RUNS.items():
        told = OTHER_RUN.fullmatch(getattr(getattr(recipe, section), name, None) or "")
        key = f"{section}.{name}"
        folder = its.get(key)
        if told is not None and folder is not None and _is_run(folder, result, told):
            ours[key] = folder
        elif name == "from_run" and folder is not None and began is not None:
            its[key] = _name(summarize(began))
    both = ((key, (ours.get(key), its.get(key))) for key in {**ours, **its})
    return its, {key: (expected, got) for key, (expected, got) in both if expected != got}


def summarize(began: Mapping[str, Any], *, shortened: bool = False) -> dict[str, Any]:
    """Return recipe, changes and seed of the run that another continued from.

    That it was shortened is among its changes, unless ``shortened`` runs are meant.
    """
    if isinstance(began["recipe"], str):
        return {"recipe": began["recipe"], "changes": began.get("changes", []), "seed": began["seed"]}
    name = began["recipe"]["name"]
    _, found = compare_settings(began, recipe_of(began) if shortened else load_any_recipe(name))
    return {"recipe": name, "changes": as_set(found), "seed": began["seed"]}


def as_set(changes: Changes) -> list[str]:
    """Return changes as ``--set`` takes them: ``section.field=value``."""
    return [f"{key}={got if isinstance(got, str) else json.dumps(got)}" for key, (_, got) in changes.items()]


def folder_of(recipe: str, changes: Sequence[str]) -> str:
    """Return the folder of a recipe's results with these changes: ``bert/small+decay.strength=0.03``."""
    return "+".join([recipe, *(change.replace("/", "~").replace("+", "~") for change in changes)])


def _is_run(folder: str, result: Mapping[str, Any], told: re.Match[str]) -> bool:
    """Return whether a run continued from the run that its recipe names, by the folder and by what is known of it."""
    seed = result["seed"] if told["seed"] == "{seed}" else int(told["seed"])
    began = result.get("from_run")
    if began is not None:
        before = summarize(began, shortened=_is_shortened(result))
        if before != {"recipe": told["name"], "changes": [], "seed": seed}:
            return False
    return re.fullmatch(rf"{re.escape(told['name'])}(-[0-9a-f]{{8}})?/seed-{seed}", folder) is not None


def _is_shortened(result: Mapping[str, Any]) -> bool:
    return result["recipe"].get("shortened_from") is not None


def _name(began: Mapping[str, Any]) -> str:
    return f"{folder_of(began['recipe'], began['changes'])}/seed-{began['seed']}"
