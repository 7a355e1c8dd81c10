"""Arguments that several verbs take, and what a shell completes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_recipe(incomplete: str) -> list[str]:
    """Return the shipped recipes that begin so."""
    from factorized.vision.recipes import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Return the models that begin so."""
    from factorized.vision.models.names import MODELS

    return [name for name in MODELS if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return the folders of finished runs under ``out`` that begin so."""
    runs = (str(path.parent) for path in Path("out").glob("**/result.json"))
    return sorted(run for run in runs if run.startswith(incomplete))


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A recipe of `factorized recipes ls`, or the path of your own .toml file.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The folder of a finished run, such as out/digits/resnet8/seed-0.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|PATH",
        help="The folder that holds data sets (without it $FACTORIZED_DATA, else ./data), or a data set itself that "
        "takes the place of the recipe's: an .npz or prepared file, a CIFAR folder, an image folder, hf:OWNER/NAME.",
        show_default=False,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.FIELD=VALUE",
        help="Change a field of the recipe; may be given several times.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="cpu|cuda|cuda:1", help="Where to compute; a GPU where there is one.", show_default=False),
]
TrustModel = Annotated[
    bool,
    typer.Option("--trust-model", help="Run the code of the run's model where that is module:function, not ours."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]


def examples(*lines: str) -> str:
    """Return the epilog of a verb's help: one example on each line."""
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)
