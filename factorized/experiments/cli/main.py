"""``factorized``: the entry point of the command line. An error is one line and exit code 2."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
import traceback
import unicodedata
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from factorized.experiments.cli.allocator import keep_freed_memory
from factorized.experiments.cli.processes import process_number
from factorized.experiments.data.explain import in_words, rule
from factorized.experiments.data.extras import install_command, not_installed
from factorized.experiments.training.interrupt import CannotWrite, Interrupted, OneInterrupt

OLDEST_TYPER = (0, 29)  # as pyproject.toml has it
LONGEST = 4096  # characters of an argument: as long as a path can be
STOPPED = 128 + signal.SIGINT
# packages of the extra "vision", which the library itself does without
EXTRAS = ("datasets", "jinja2", "matplotlib", "numpy", "PIL", "pydantic", "rich", "sklearn", "tensorboard", "typer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 for a failed check, 2 for an error, 128 + n for signal n."""
    if arguments is not None:
        return _run(arguments, OneInterrupt())
    keep_freed_memory()
    interrupt = OneInterrupt()
    if isinstance(sys.stdout, io.TextIOWrapper):  # print "?" for signs that its encoding lacks, and do not fail
        sys.stdout.reconfigure(errors="replace")
    try:
        interrupt.install()
        code = _run(sys.argv[1:], interrupt)
    except KeyboardInterrupt:  # while an error was being explained
        _complain("stopped by Ctrl-C")
        code = STOPPED
    interrupt.close(code)
    return code


def _run(given: Sequence[str], interrupt: OneInterrupt) -> int:
    try:
        given = _checked_words(given)
        _check_typer()
        # imported here so that a missing package is reported like any other error
        from factorized.experiments.cli.app import app

        if os.environ.get("_FACTORIZED_COMPLETE") == "complete_bash":
            return _complete_for_bash()
        code = app(list(given) or ["--help"], prog_name="factorized", standalone_mode=False)
        sys.stdout.flush()
        if code == STOPPED:  # typer makes this of KeyboardInterrupt, without a word
            raise KeyboardInterrupt
        return code or 0
    except BrokenPipeError:  # the reader of the pipe has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123, for the flush at exit
        return 0
    except KeyboardInterrupt:
        goes_on = _verb(given) in (["compress"], ["reproduce"])
        kept = f"; {_how_to_continue('what is finished is kept', given)}" if goes_on else ""
        _complain(f"stopped by Ctrl-C{kept}")
        return STOPPED
    except Exception as error:
        if interrupt.taken and not isinstance(error, Interrupted):  # an import that was interrupted
            raise KeyboardInterrupt from None
        return _explain(error, given)


def _check_typer() -> None:
    """Raise if typer is so old that options of the verbs or their help would fail with errors of Python."""
    import typer

    if tuple(map(int, re.findall(r"\d+", typer.__version__)[:2])) < OLDEST_TYPER:
        needed = ".".join(map(str, OLDEST_TYPER))
        raise ImportError(
            f"the command line needs typer {needed} or newer, and {typer.__version__} is installed: "
            f"{install_command('vision')}"
        )


def _complete_for_bash() -> int:
    """Print the completions for bash, without the part of the word up to "=" or ":", which bash keeps."""
    from factorized.experiments.cli.app import app
    from factorized.experiments.cli.arguments import join_bash_words

    kept, found = join_bash_words(), io.StringIO()
    with suppress(SystemExit), redirect_stdout(found):
        app([], prog_name="factorized")
    print("\n".join(line.removeprefix(kept) for line in found.getvalue().splitlines()))
    return 0


def _checked_words(given: Sequence[str]) -> list[str]:
    """Return the words of a command with "~" expanded; raise for words that cannot be valid arguments."""
    checked = []
    for before, word in pairwise(["", *given]):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if word.startswith("--") and not equals:
            checked.append(word)
            continue
        what = f"the value of {option}" if option.startswith("-") else "an argument"
        if not value.strip():
            raise ValueError(f"{what} is empty: {value!r}; give one, or leave it out")
        if any(unicodedata.category(sign) == "Cc" for sign in value):
            raise ValueError(f"{what} holds a line break or control character: {value[:40]!r}")
        if any(unicodedata.category(sign) == "Cs" for sign in value):  # how Python holds such bytes
            raise ValueError(f"{what} holds bytes that are not text in {sys.getfilesystemencoding()}: {value[:40]!r}")
        if len(value) > LONGEST:
            raise ValueError(f"{what} is {len(value):,} characters long, expected at most {LONGEST:,}: {value[:40]}…")
        home = os.path.expanduser(value) if value == "~" or value.startswith("~/") else value  # noqa: PTH111
        checked.append(f"{option}={home}" if equals else home)
    return checked


def _explain(error: Exception, given: Sequence[str]) -> int:
    if "--debug" in given:
        traceback.print_exception(error)
    if isinstance(error, (Interrupted, CannotWrite)):
        _complain(f"{error}; {_how_to_continue(error.kept, given)}")
        return error.exit_code
    missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in EXTRAS and "pip install" not in str(error):
        _complain(not_installed("this", missing, "vision"))
    elif isinstance(error, (ValueError, OSError, ImportError)):
        _complain(in_words(error))
    elif (misused := _misuse(error, given)) is not None:
        _complain(f"{misused}{'' if misused.endswith(('.', '?')) else '.'} See `{_help_of(error)}`.")
    else:
        _unexpected(error)
    return 2


def _how_to_continue(kept: str, given: Sequence[str]) -> str:
    """Return the command to type after a run that ended early, and what it finds there."""
    again = [word for word in given if word not in ("--overwrite", "--resume", "--auto-resume")]
    verb = _verb(given)
    if verb == ["train"]:  # others resume by themselves
        again.append("--resume")
    started_by = "torchrun … -m factorized" if "LOCAL_RANK" in os.environ else "factorized"
    what = "start over" if verb == ["demo"] else f"{kept}, continue"
    return f"{what} with: {started_by} {shlex.join(again)}"


def _misuse(error: Exception, given: Sequence[str]) -> str | None:
    """Return the usage error in the command, or None if the error is of another kind."""
    from typer.exceptions import TyperException

    if not isinstance(error, TyperException):
        return None
    if type(error).__name__ == "NoSuchOption":  # a class that typer keeps to itself
        return _no_such_option(getattr(error, "option_name", ""), getattr(error, "ctx", None))
    message = error.format_message()
    if invalid := re.fullmatch(r"Invalid value for '(.+?)': (.+?)(, unable to parse .*)?\.?", message):
        return _invalid_value(invalid[1], rule(invalid[2]), given)
    return message


def _invalid_value(option: str, told: str, given: Sequence[str]) -> str:
    """Return what an option must be, and what it was given."""
    if not told.startswith("must be"):
        return f"{option}: {told}"
    got = [after for before, after in pairwise(given) if before == option]
    got += [word.partition("=")[2] for word in given if word.startswith(f"{option}=")]
    return f"{option} {told}" + (f", got {got[0]!r}" if got else "")


def _no_such_option(option: str, context: Any) -> str:
    from factorized.experiments.cli.arguments import recipe_fields

    known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    fields = [name for name in recipe_fields() if name.split(".")[1] == option.strip("-").replace("-", "_")]
    if fields and "--set" in known:
        return f"there is no option {option}; change the recipe by --set {fields[0]}=VALUE"
    near = get_close_matches(option, known, n=1, cutoff=0.7)
    return f"there is no option {option}" + (f"; did you mean {near[0]}?" if near else "")


def _unexpected(error: Exception) -> None:
    hint = "use a smaller run.batch, such as --set run.batch=64" if "out of memory" in str(error) else ""
    _complain(f"{type(error).__name__}: {error}; {hint or '`factorized --debug …` shows where'}", everywhere=True)


def _complain(message: str, *, everywhere: bool = False) -> None:
    """Print one line to standard error, from the first process only."""
    number = process_number()
    if number == 0 or everywhere:
        who = f"factorized (process {number})" if number else "factorized"
        print(f"{who}: {' '.join(message.split())}", file=sys.stderr)


def _help_of(error: Exception) -> str:
    """Return the command that shows the help of the verb that was misused."""
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'factorized'} --help"


def _verb(given: Sequence[str]) -> list[str]:
    """Return the verb among the words of a command, or nothing."""
    from factorized.experiments.cli.app import app

    verbs = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    return [word for word in given if word in verbs][:1]
