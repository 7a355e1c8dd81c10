"""Take the results of runs on text into ``results/``, without their files and paths.

    python -m benchmarks.take_in [--note NOTE] RUN...

A run of a recipe goes to ``results/RECIPE/seed-N.json``. Settings that differ from the recipe follow its name, each as
``--set`` takes it: ``results/bert/small-flambe+decay.strength=0.03/seed-0.json``. How often a run was evaluated and
saved is not among them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.text.trained import read_text_result

Run = dict[str, Any]
RESULTS = Path(__file__).parent.parent / "results"
DROPPED = ("files", "checksum")  # of the run's folder, which is not kept
WITHOUT_EFFECT = ("run.evaluate_every", "run.checkpoint_every")  # on what a run learns


def take_in(run: Path, results: Path = RESULTS, note: str | None = None) -> Path:
    """Write the result of a finished run on text to its place below ``results``, and return that place.

    ``note`` says what a reader must know of the measurement, such as that other runs shared the GPU; its times are
    then not shown. A result is never replaced by another.
    """
    found = cleaned(read_text_result(run))
    if found["machine"].get("commit") is None:
        raise ValueError(f"{run}: its result has no commit; train it again from a git checkout")
    if note is not None:
        found["note"] = note
    for path in _paths(found):
        raise ValueError(f"{run}: its result names {path}, which is on one machine only; train it with relative names")
    place = results / folder_of(found["recipe"]["name"], found["changes"]) / f"seed-{found['seed']}.json"
    text = json.dumps(found, ensure_ascii=False) + "\n"
    if place.is_file() and place.read_text() != text:
        raise ValueError(f"{place} holds another result of the same settings; remove it to take in {run}")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


def cleaned(result: Mapping[str, Any]) -> Run:
    """Return a result with its ``changes``, without the run's files, and with the recipe that it went on from."""
    found = {key: value for key, value in result.items() if key not in DROPPED}
    began = found.get("from_run")
    if found["recipe"]["model"]["from_run"] is not None:
        if began is None:
            raise ValueError("the result does not say which run it began from; train it again")
        found["from_run"] = {
            "recipe": began["recipe"]["name"],
            "changes": cleaned(began)["changes"],
            "seed": began["seed"],
        }
        name = f"{folder_of(found['from_run']['recipe'], found['from_run']['changes'])}/seed-{began['seed']}"
        model = {**found["recipe"]["model"], "from_run": name}
        found["recipe"] = {**found["recipe"], "model": model}
    return {**found, "changes": changes(found["recipe"])}


def changes(recipe: Mapping[str, Any]) -> list[str]:
    """Return what a run changed in the recipe that it names, each as ``section.field=value``."""
    shipped = load_any_recipe(recipe["name"]).to_dict()
    return [
        f"{section}.{field}={_as_set(value)}"
        for section, fields in recipe.items()
        if isinstance(fields, dict) and isinstance(shipped.get(section), dict)
        for field, value in fields.items()
        if value != shipped[section].get(field) and f"{section}.{field}" not in WITHOUT_EFFECT
    ]


def folder_of(recipe: str, changed: list[str]) -> str:
    """Return the folder of a recipe's results with these changes, below ``results``."""
    return "+".join([recipe, *(change.replace("/", "~").replace("+", "~") for change in changed)])


def _as_set(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--note")
    arguments = parser.parse_args()
    for folder in arguments.runs:
        print(take_in(folder, note=arguments.note))
