"""``factorized``: the command line. A verb is a file; an error is one line and exit code 2."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from factorized.cli import compose, data, demo, evaluate, plan, recipes, train
from factorized.cli.arguments import examples
from factorized.cli.console import process_number
from factorized.vision.interrupt import Interrupted

app = typer.Typer(
    name="factorized",
    help="Train networks whose weights are products, and turn them back into plain PyTorch.",
    epilog=examples(
        "factorized demo                                        three minutes, no download",
        "factorized recipes ls cifar10                          what can be trained",
        "factorized train cifar10/resnet32x2-lowrank-0.1-si-fd --data DIR --seeds 3",
        "factorized compose out/digits/resnet8-wide-fd/seed-0 --to onnx",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(recipes.app, name="recipes")
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("evaluate", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("compose", epilog=compose.EXAMPLES)(compose.compose)
app.add_typer(data.app, name="data")
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Train networks whose weights are products, and turn them back into plain PyTorch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 for a failed check, 2 for an error, 128 + n for signal n."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(given or ["--help"], prog_name="factorized", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # whoever read this has had enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123, for the flush at exit
        return 0
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C")
        return 130
    except Exception as error:
        return _explain(error, given)


def _explain(error: Exception, given: Sequence[str]) -> int:
    if "--debug" in given:
        traceback.print_exception(error)
    if isinstance(error, Interrupted):
        again = [word for word in given if word not in ("--overwrite", "--resume")]
        _complain(f"{error}; its state is saved, go on with: {shlex.join(['factorized', *again, '--resume'])}")
        return error.exit_code
    if isinstance(error, TyperException):
        _complain(f"{error.format_message()} See `{_help_of(given)}`.")
    elif isinstance(error, (ValueError, OSError, ImportError)):
        _complain(str(error))
    else:
        _unexpected(error)
    return 2


def _unexpected(error: Exception) -> None:
    hint = "use a smaller run.batch, such as --set run.batch=64" if "out of memory" in str(error) else ""
    _complain(f"{type(error).__name__}: {error}; {hint or '`factorized --debug …` shows where'}", everywhere=True)


def _complain(message: str, *, everywhere: bool = False) -> None:
    """Print one line to standard error; what every process would say, only the first one does."""
    number = process_number()
    if number == 0 or everywhere:
        who = f"factorized (process {number})" if number else "factorized"
        print(f"{who}: {' '.join(message.split())}", file=sys.stderr)


def _help_of(given: Sequence[str]) -> str:
    verbs = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    verb = [word for word in given if word in verbs][:1]
    return " ".join(["factorized", *verb, "--help"])
