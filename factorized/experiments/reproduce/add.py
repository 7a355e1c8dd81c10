"""Add the result of a run from elsewhere, if it has our recipe and our data."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from factorized.experiments.data.load import EMBEDDED
from factorized.experiments.recipes.find import check_any_recipe
from factorized.experiments.recipes.identity import RUNS, fingerprint
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.recipes.text import AnyRecipe
from factorized.experiments.reproduce.changes import Changes, as_set, compare_settings, folder_of, recipe_of, summarize
from factorized.experiments.reproduce.data import data_checksum
from factorized.experiments.reproduce.runs import Run, read_run
from factorized.experiments.training.record import write_json
from factorized.experiments.training.result import Result
from factorized.files.atomic import write_whole


def add_result(
    path: Path,
    results: Path,
    data: str | None,
    known: Sequence[Run],
    *,
    changed: bool = False,
    note: str | None = None,
) -> Path:
    """Copy a result into ``results`` and return where; a ``ValueError`` says why it does not fit.

    Its recipe must be the shipped one of that name, shortened or not. With ``changed``, other settings may differ from
    it; they follow its name: ``bert/small+decay.strength=0.03/seed-0.json``. Its data must have the checksum of ours:
    those in the folder ``data``, or those of the results that are ``known`` already. ``note`` is kept with it: what a
    reader must know of the measurement.
    """
    run = read_run(path)
    recipe = recipe_of(run.result)
    check_any_recipe(run.recipe, "its recipe")
    settings, changes = compare_settings(run.result, recipe)
    if changes and not changed:
        _refuse_changes(run, changes)
    _check_data(run, recipe, data, known)
    kept = _kept(run, settings, as_set(changes), note)
    there = results / folder_of(run.name, as_set(changes)) / f"seed-{run.seed}.json"
    mark = _fingerprint(kept)
    if recipe.shortened_from is not None or (there.exists() and _mark_of(there) != mark):
        there = there.parent / mark / there.name  # not the run that is looked for by this name
    if there.exists():
        raise ValueError(f"{there} already holds this run; to replace it, remove that file first")
    there.parent.mkdir(parents=True, exist_ok=True)
    if kept == run.result:
        write_whole(there, lambda temporary: shutil.copyfile(path, temporary))
    else:
        write_json(there, kept)
    return there


def _mark_of(there: Path) -> str:
    try:
        return _fingerprint(read_run(there).result)
    except ValueError as error:
        raise ValueError(f"{there} is there already, and is damaged ({error}); remove that file first") from None


def _fingerprint(result: Result) -> str:
    return fingerprint(result["recipe"], result["data"]["checksum"])


def _refuse_changes(run: Run, changes: Changes) -> None:
    field, (expected, got) = next(iter(changes.items()))
    raise ValueError(
        f"its {field} is {got!r}, and {run.name} has {expected!r}: it is a run of another recipe; --changed adds "
        "it beside those of that recipe"
    )


def _check_data(run: Run, recipe: AnyRecipe, data: str | None, known: Sequence[Run]) -> None:
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


def _kept(run: Run, settings: Mapping[str, Any], changes: Sequence[str], note: str | None) -> Result:
    """Return a result with its changes and the note, and without folders of other runs, which are on one machine."""
    found = dict(run.result)
    recipe = dict(run.recipe)
    for section, name in RUNS.items():
        if recipe.get(section, {}).get(name) is not None:
            recipe[section] = {**recipe[section], name: settings[f"{section}.{name}"]}
    found["recipe"] = recipe
    if found.get("from_run") is not None:
        found["from_run"] = summarize(found["from_run"])
    if changes:
        found["changes"] = list(changes)
    if note is not None:
        found["note"] = note
    if (path := next(_paths(found), None)) is not None:
        raise ValueError(f"it names {path}, which is on one machine only; train it with relative names")
    return found


def _paths(value: object) -> Iterator[str]:
    """Yield every string below ``value`` that is an absolute path."""
    if isinstance(value, str) and value.startswith(("/", "~/", "hf:/", "hf:~")):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item)
