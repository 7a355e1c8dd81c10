"""``factorized compress``: compress a trained model with its data, and train it further."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from factorized.experiments.cli.arguments import Data, Device, Quiet, TrustModel, complete_recipe, examples
from factorized.experiments.cli.console import console, plain_table, progress_bar, say

if TYPE_CHECKING:
    from factorized.experiments.compress.subject import Subject
    from factorized.experiments.recipes.recipe import Factorize
    from factorized.experiments.recipes.text import AnyRecipe

EXAMPLES = examples(
    "factorized compress out/digits/resnet8/seed-0 --ratio 0.3",
    "factorized compress out/cifar10/resnet32x2/seed-0 --ratio 0.1 --data DIR --recover cifar10/resnet32x2",
    "factorized compress out/language/tiny/seed-0 --ratio 0.5 --to composed",
    "factorized compress models/gpt2 --ratio 0.7 --data TEXTS  TEXTS/*.txt",
    "factorized compress mymodels:trained --ratio 0.5 --data images.npz",
)
NO_RECOVERY = "none"


class Form(StrEnum):  # typer takes no list of a Literal
    """The plain forms in which the compressed network can also be written."""

    lowered = "lowered"
    composed = "composed"


def compress(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder of a finished run, the folder of a Hugging Face model, or module:function: a function "
            "that takes classes= and returns a trained classifier of images.",
        ),
    ],
    ratio: Annotated[float, typer.Option(help="Share of the parameters to keep.")],
    data: Data = None,
    recover: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="The recipe that trains the compressed network further. By default, a run trains for a tenth of its "
            f"own recipe, and other models are not trained. `{NO_RECOVERY}` trains nothing.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    to: Annotated[
        list[Form] | None,
        typer.Option(
            metavar="lowered|composed", help="Also write the network as plain modules: still low-rank, or dense."
        ),
    ] = None,
    ranks: Annotated[
        Literal["loss", "outputs", "uniform"],
        typer.Option(
            help="Choose ranks by effect on the loss or on outputs, or one share of full rank for all layers."
        ),
    ] = "loss",
    kind: Annotated[
        Literal["spatial", "channel"],
        typer.Option(help="Split a convolution into two one-dimensional ones, or into k×k and 1×1."),
    ] = "spatial",
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="LAYER", help="Layers to leave dense: names or globs.")
    ] = None,
    first_and_last: Annotated[
        bool, typer.Option("--first-and-last", help="Also factorize the first and the last layer.")
    ] = False,
    multiple_of: Annotated[int | None, typer.Option(min=1, help="Round ranks to multiples of this number.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Training examples to calibrate with.")] = 2048,
    layers_per_pass: Annotated[
        int | None,
        typer.Option(min=1, help="Collect moments for this many layers at a time: slower, but needs less memory."),
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Fill one layer after another, each making up for the errors before it: slower, and more accurate.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder to write; by default compressed-RATIO in the run, or out/compressed/.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over, and replace what the folder holds.")
    ] = False,
    device: Device = None,
    trust_model: TrustModel = False,
    quiet: Quiet = False,
) -> None:
    """Compress a trained model: choose ranks and fill factors by its data, train it further, and write a page about it.

    If the command was stopped, run it again: it continues where it stopped.
    """
    from factorized.experiments.cli.device import pick_device
    from factorized.experiments.cli.subjects import default_folder, open_subject
    from factorized.experiments.compress.page import write_page
    from factorized.experiments.compress.work import Settings, Work, made_folder
    from factorized.experiments.training.folder import claimed
    from factorized.experiments.training.progress import Reporter

    settings = Settings(
        ratio=ratio,
        ranks=ranks,
        kind=kind,
        exclude=tuple(exclude or ()),
        keep_first_and_last=not first_and_last,
        multiple_of=multiple_of,
        samples=samples,
        layers_per_pass=layers_per_pass,
        sequential=sequential,
    )
    subject = open_subject(model, data, pick_device(device), trust_model=trust_model)
    recipe = _recovery(subject, recover, settings.factorize)
    folder = out or default_folder(model, ratio)

    def tell(line: str) -> None:
        if not quiet:
            say(line)

    reporter = Reporter(console(quiet=quiet), quiet=quiet)
    with made_folder(folder), progress_bar(quiet=quiet) as bar, claimed(folder):
        work = Work(subject, settings, folder, overwrite=overwrite, say=tell, progress=bar, reporter=reporter)
        work.run(recipe, [form.value for form in to or ()])
        page = write_page(work.state, folder)
    _report(work.state)
    say(f"figures and layers: {page}")


def _recovery(subject: Subject, name: str | None, factorize: Factorize) -> AnyRecipe | None:
    """Return the recipe that recovers the network: the one of that name, or its own; None for no recovery."""
    from factorized.experiments.compress.subject import recovery_recipe
    from factorized.experiments.recipes.find import load_any_recipe

    if name == NO_RECOVERY or (name is None and subject.recipe is None):
        return None
    own = None if subject.recipe is None else subject.fit(subject.recipe)
    given = None if name is None else subject.fit(load_any_recipe(name))
    return recovery_recipe(own, given, factorize)


def _report(state: dict[str, Any]) -> None:
    score = state["score"]
    table = plain_table("network", "parameters", score, numbers=("parameters", score))
    for stage in ("before", "compressed", "recovered", "lowered", "composed"):
        if stage in state:
            found = state[stage]
            name = "dense" if stage == "before" else stage
            table.add_row(name, f"{found['parameters']:,}", f"{found['scores'][score]:.2f}")
    console().print(table)
