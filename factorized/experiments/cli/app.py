"""The command-line application: all verbs, ``--debug`` and ``--version``."""

from __future__ import annotations

from typing import Annotated

import typer

from factorized.experiments.cli import (
    bench,
    compose,
    compress,
    data,
    demo,
    evaluate,
    generate,
    plan,
    recipes,
    report,
    reproduce,
    results,
    train,
    translate,
)
from factorized.experiments.cli.arguments import examples
from factorized.experiments.cli.console import say
from factorized.experiments.cli.verb import Group, Verb
from factorized.version import __version__

app = typer.Typer(
    cls=Group,
    name="factorized",
    help="Train networks whose weights are products, and turn them back into plain PyTorch.",
    epilog=examples(
        "factorized demo                                   a few minutes, no download",
        "factorized recipes ls cifar10                     what can be trained",
        "factorized train cifar10/resnet32x2-lowrank-0.1-si-fd --data DIR --seeds 3",
        "factorized reproduce table1 --data DIR --dry-run  the paper's Table 1",
        "factorized compose out/digits/resnet8-wide-fd/seed-0 --to onnx",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(recipes.app, name="recipes")
app.command("plan", cls=Verb, epilog=plan.EXAMPLES)(plan.plan)
app.command("train", cls=Verb, epilog=train.EXAMPLES)(train.train)
app.command("evaluate", cls=Verb, epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("compose", cls=Verb, epilog=compose.EXAMPLES)(compose.compose)
app.command("compress", cls=Verb, epilog=compress.EXAMPLES)(compress.compress)
app.command("translate", cls=Verb, epilog=translate.EXAMPLES)(translate.translate)
app.command("generate", cls=Verb, epilog=generate.EXAMPLES)(generate.generate)
app.command("reproduce", cls=Verb, epilog=reproduce.EXAMPLES)(reproduce.reproduce)
app.add_typer(results.app, name="results")
app.command("report", cls=Verb, epilog=report.EXAMPLES)(report.report)
app.add_typer(data.app, name="data")
app.command("bench", cls=Verb, epilog=bench.EXAMPLES)(bench.bench)
app.command("demo", cls=Verb, epilog=demo.EXAMPLES)(demo.demo)


def _show_version(asked: bool) -> None:
    if asked:
        say(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Train networks whose weights are products, and turn them back into plain PyTorch."""
