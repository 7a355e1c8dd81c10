"""``factorized``: the command line from the outside. An error is one line and exit code 2."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence

from factorized.cli.processes import process_number
from factorized.vision.data.extras import install_command
from factorized.vision.interrupt import Interrupted, OneInterrupt

STOPPED = 128 + signal.SIGINT
# packages of the extra "vision", which the library itself does without
EXTRAS = ("datasets", "jinja2", "numpy", "PIL", "pydantic", "rich", "sklearn", "tensorboard", "typer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 for a failed check, 2 for an error, 128 + n for signal n."""
    if arguments is not None:
        return _run(arguments, OneInterrupt())
    interrupt = OneInterrupt()
    interrupt.install()
    try:
        code = _run(sys.argv[1:], interrupt)
    except KeyboardInterrupt:  # while an error was being explained
        _complain("stopped by Ctrl-C")
        code = STOPPED
    interrupt.close(code)
    return code


def _run(given: Sequence[str], interrupt: OneInterrupt) -> int:
    try:
        from factorized.cli.app import app  # here, so that a package it misses is an error like any other

        code = app(list(given) or ["--help"], prog_name="factorized", standalone_mode=False)
        sys.stdout.flush()
        if code == STOPPED:  # typer makes this of KeyboardInterrupt, without a word
            raise KeyboardInterrupt
        return code or 0
    except BrokenPipeError:  # whoever read this has had enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123, for the flush at exit
        return 0
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C")
        return STOPPED
    except Exception as error:
        if interrupt.taken and not isinstance(error, Interrupted):  # what is left of an import that was cut off
            raise KeyboardInterrupt from None
        return _explain(error, given)


def _explain(error: Exception, given: Sequence[str]) -> int:
    if "--debug" in given:
        traceback.print_exception(error)
    if isinstance(error, Interrupted):
        _complain(f"{error}; its state is saved, go on with: {_command_to_resume(given)}")
        return error.exit_code
    missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in EXTRAS and "pip install" not in str(error):
        _complain(f"this needs {missing}, which is not installed: {install_command('vision')}")
    elif isinstance(error, (ValueError, OSError, ImportError)):
        _complain(str(error))
    elif (misused := _misuse(error)) is not None:
        _complain(f"{misused.rstrip('.')}. See `{_help_of(given)}`.")
    else:
        _unexpected(error)
    return 2


def _command_to_resume(given: Sequence[str]) -> str:
    again = [word for word in given if word not in ("--overwrite", "--resume", "--auto-resume")]
    started_by = "torchrun … -m factorized.cli" if "LOCAL_RANK" in os.environ else "factorized"
    return f"{started_by} {shlex.join([*again, '--resume'])}"


def _misuse(error: Exception) -> str | None:
    """Return what is wrong with the command itself; None if it is something else that went wrong."""
    from typer.exceptions import TyperException

    return error.format_message() if isinstance(error, TyperException) else None


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
    from factorized.cli.app import app

    verbs = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    verb = [word for word in given if word in verbs][:1]
    return " ".join(["factorized", *verb, "--help"])
