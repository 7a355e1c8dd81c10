"""Taking in the result of a run from elsewhere, if it is a run of our recipe on our data."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from factorized.experiments.data.load import EMBEDDED
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.identity import RUNS, deciding, fingerprint
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.recipes.shorten import shorten
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.reproduce.data import data_checksum
from factorized.experiments.reproduce.planned import OTHER_RUN
from factorized.experiments.reproduce.runs import Run, read_run
from factorized.files.atomic import write_whole


def add_result(path: Path, results: Path, data: str | None, known: Sequence[Run]) -> Path:
    """Copy a result into ``results`` and return where; a ``ValueError`` says why it does not fit.

    Its recipe must be the shipped one of that name, shortened or not. Its data must have the checksum of ours: those in
    the folder ``data``, or those of the results that are ``known`` already.
    """
    run = read_run(path)
    recipe = load_any_recipe(run.name)
    if run.recipe.get("shortened_from") is not None and run.length is not None:
        recipe = shorten(recipe, run.length)
    _check_recipe(run, recipe)
    _check_data(run, recipe, data, known)
    there = results / run.name / f"seed-{run.seed}.json"
    mark = _fingerprint(run)
    if recipe.shortened_from is not None or (there.exists() and _fingerprint(read_run(there)) != mark):
        there = there.parent / mark / there.name  # another run than the one that people look for
    if there.exists():
        raise ValueError(f"{there} already holds this run; remove that file first if it is to be replaced")
    there.parent.mkdir(parents=True, exist_ok=True)
    write_whole(there, lambda temporary: shutil.copyfile(path, temporary))
    return there


def _fingerprint(run: Run) -> str:
    return fingerprint(run.recipe, run.result["data"]["checksum"])


def _check_recipe(run: Run, recipe: Recipe | TextRecipe) -> None:
    ours, its = deciding(recipe), deciding(run.recipe)
    for section, name in RUNS.items():  # a run that it went on from, wherever that was
        told = OTHER_RUN.fullmatch(getattr(getattr(recipe, section), name, None) or "")
        folder = its.get(section, {}).get(name) or ""
        seed = run.seed if told is None or told["seed"] == "{seed}" else told["seed"]
        if told is not None and re.fullmatch(rf"{re.escape(told['name'])}(-[0-9a-f]{{8}})?/seed-{seed}", folder):
            ours[section][name] = folder
    for field, (expected, got) in _differences(ours, its).items():
        raise ValueError(f"its {field} is {got!r}, and {run.name} has {expected!r}: it is a run of another recipe")


def _differences(ours: Mapping[str, Any], its: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for section in {**ours, **its}:
        one, other = ours.get(section), its.get(section)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            fields = (name for name in {**one, **other} if one.get(name) != other.get(name))
            found |= {f"{section}.{name}": (one.get(name), other.get(name)) for name in fields}
        elif one != other:
            found[section] = (one, other)
    return found


def _check_data(run: Run, recipe: Recipe | TextRecipe, data: str | None, known: Sequence[Run]) -> None:
    name, checksum = recipe.data.name, str(run.result["data"]["checksum"])
    embedded = name == EMBEDDED if isinstance(recipe, Recipe) else not recipe.data.train
    if data is not None or embedded:
        expected = {data_checksum(recipe, data): "yours" if data is not None else "those of this package"}
    else:
        on_it = (other for other in known if other.result["data"]["name"] == run.result["data"]["name"])
        expected = {str(other.result["data"]["checksum"]): f"those of {other.path}" for other in on_it}
    if not expected:
        raise ValueError(f"no result on {name!r} is there to compare its data with; name your copy's folder by --data")
    if checksum not in expected:
        theirs, where = next(iter(expected.items()))
        raise ValueError(f"it was trained on other data: checksum {checksum[:12]}…, and {where} have {theirs[:12]}…")
