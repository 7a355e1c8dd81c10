"""Arguments that several verbs take, and what a shell completes for them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

MOST_SEEDS = 10_000
LARGEST_SEED = 2**63 - 1  # that torch takes
EXAMPLE_WIDTH = 77  # with the margins of the help and a backslash, 80 columns


def complete_recipe(incomplete: str) -> list[str]:
    """Return the shipped recipes that start with the given text."""
    from factorized.experiments.recipes.find import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Return the models that start with the given text."""
    from factorized.experiments.models.names import MODELS

    return [name for name in MODELS if name.startswith(incomplete)]


def complete_scheme(incomplete: str) -> list[str]:
    """Return the schemes that start with the given text."""
    return [word for word in _words(recipe_fields()["factorize.scheme"]) if word.startswith(incomplete)]


def complete_variant(incomplete: str) -> list[str]:
    """Return the variants of overcomplete that start with the given text."""
    return [word for word in _words(recipe_fields()["factorize.variant"]) if word.startswith(incomplete)]


def complete_change(incomplete: str) -> list[str]:
    """Return the recipe fields that start with the given text; where only one does, with its possible values."""
    fields = recipe_fields()
    name, equals, value = incomplete.partition("=")
    found = [field for field in fields if field == name or (not equals and field.startswith(name))]
    if len(found) != 1:
        return [f"{field}=" for field in found]
    values = [word for word in _words(fields[found[0]]) if word.startswith(value)] or [value]
    return [f"{found[0]}={word}" for word in values]


def join_bash_words() -> str:
    """Join the words that bash split at "=" and ":" for a completion; return the part of the word that bash keeps."""
    words: list[str] = []
    current = asked = int(os.environ["COMP_CWORD"])
    kept = ""
    for place, word in enumerate(os.environ["COMP_WORDS"].split("\n")):
        if words and (word in ("=", ":") or words[-1].endswith(("=", ":"))):
            before, words[-1] = words[-1], words[-1] + word
            current -= place <= asked
            kept = kept if place != asked else words[-1] if word in ("=", ":") else before
        else:
            words.append(word)
    os.environ.update(COMP_WORDS="\n".join(words), COMP_CWORD=str(current))
    return kept


def recipe_fields() -> dict[str, FieldInfo]:
    """Return the fields of a recipe by ``section.field``."""
    from factorized.experiments.recipes.recipe import Recipe, Section

    found: dict[str, FieldInfo] = {}
    for name, table in Recipe.model_fields.items():
        choices = (table.annotation, *get_args(table.annotation))
        for section in (choice for choice in choices if isinstance(choice, type) and issubclass(choice, Section)):
            found |= {f"{name}.{field}": info for field, info in section.model_fields.items()}
    return found


def _words(field: FieldInfo) -> list[str]:
    """Return the words that a field may hold, or its default where any value will do."""
    if field.annotation is bool:
        return ["true", "false"]
    words = _literals(field.annotation)
    return words or [str(field.default)] * isinstance(field.default, (int, float, str))


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in _literals(part)]


def complete_run(incomplete: str) -> list[str]:
    """Return the folders of finished runs under ``out`` that start with the given text."""
    runs = (str(path.parent) for path in Path("out").glob("**/result.json"))
    return sorted(run for run in runs if run.startswith(incomplete))


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A recipe of `factorized recipes ls`, or the path of your own .toml file.",
        autocompletion=complete_recipe,
    ),
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The folder of a finished run, such as out/digits/resnet8/seed-0.",
        autocompletion=complete_run,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|PATH",
        help="The folder that holds data sets (by default $FACTORIZED_DATA, else ./data). Or a data set in place of "
        "the recipe's: an .npz or prepared file, a CIFAR folder, an image folder, hf:OWNER/NAME.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the recipe, such as schedule.epochs=30. Repeat it for other fields.",
        autocompletion=complete_change,
    ),
]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda|cuda:1", help="Where to compute; by default a GPU if there is one.")
]
TrustModel = Annotated[
    bool,
    typer.Option("--trust-model", help="Allow a run to load its model from your own code, module:function."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, no progress.")]


def examples(*commands: str) -> str:
    """Return the epilog of a verb's help: one command on each line, long ones broken before an option."""
    return "Examples:\n\n" + "\n".join(map(_broken, commands))


def _broken(command: str) -> str:
    first, *options = re.split(r" (?=--)", command)
    lines = [first]
    for option in options:
        if len(f"{lines[-1]} {option}") < EXAMPLE_WIDTH:
            lines[-1] += f" {option}"
        else:
            lines.append(f"    {option}")
    return " \\\n".join(lines)
