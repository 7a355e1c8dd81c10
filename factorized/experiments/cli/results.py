"""``factorized results``: add results of runs from other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factorized.experiments.cli.arguments import examples
from factorized.experiments.cli.console import say
from factorized.experiments.cli.verb import Group, Verb

ADD = examples(
    "factorized results add seed-0.json --data DIR",
    "factorized results add out/cifar10/resnet32x2/seed-0/result.json",
    "factorized results add out/bert/small/seed-0/result.json --changed --note 'four runs shared the GPU'",
)
app = typer.Typer(cls=Group, help="Add results of runs from other machines.", epilog=ADD)


@app.callback()
def results() -> None:
    """Add results of runs from other machines."""


@app.command("add", cls=Verb, epilog=ADD)
def add(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="JSON files with results.")],
    results: Annotated[Path, typer.Option(help="Folder of results, as NAME/seed-SEED.json.")] = Path("results"),
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The folder of data sets to compare checksums with; by default, those of earlier results.",
        ),
    ] = None,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed", help="Also add runs whose settings differ from their recipe's, as NAME+SETTING=VALUE."
        ),
    ] = False,
    note: Annotated[
        str | None,
        typer.Option(help="A remark for readers, such as that runs shared a GPU; times of these runs are not shown."),
    ] = None,
) -> None:
    """Add results of runs of our recipes on our data; `factorized reproduce` counts them as finished.

    A file that does not fit is named with the reason and left where it is; the exit code is then 1.
    """
    from factorized.experiments.data.explain import in_words
    from factorized.experiments.reproduce.add import add_result
    from factorized.experiments.reproduce.runs import read_runs

    known = read_runs([results]).runs if results.is_dir() else []
    refused = 0
    for file in files:
        try:
            say(f"{file}: added as {add_result(file, results, data, known, changed=changed, note=note)}")
        except (ValueError, OSError) as error:
            refused += 1
            say(f"{file}: not added: {in_words(error)}")
    if refused:
        raise typer.Exit(1)
