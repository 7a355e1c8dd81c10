"""``factorized results``: results of runs made elsewhere."""

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
app = typer.Typer(cls=Group, help="Take in results of runs made elsewhere.", epilog=ADD)


@app.callback()
def results() -> None:
    """Take in results of runs made elsewhere."""


@app.command("add", cls=Verb, epilog=ADD)
def add(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="JSON files of runs.", show_default=False)],
    results: Annotated[Path, typer.Option(help="Where results are kept, as NAME/seed-SEED.json.")] = Path("results"),
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The folder of data sets, to compare checksums with; without it, those of the results that are there.",
            show_default=False,
        ),
    ] = None,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Also runs with other settings than their recipe's, as NAME+SETTING=VALUE."),
    ] = False,
    note: Annotated[
        str | None,
        typer.Option(
            help="What readers must know, such as that runs shared a GPU; the times of the runs are then not shown.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Take in results whose recipe and data are ours; `factorized reproduce` counts them as finished.

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
