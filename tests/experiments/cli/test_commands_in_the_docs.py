"""Every command that a document or a help page shows can be given, and names recipes that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from factorized.experiments.cli.app import app
from factorized.experiments.recipes.find import recipe_names
from tests.experiments.cli.conftest import Cli
from tests.experiments.text.small import BY_TASK, SMALL, files

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [README, *(path.read_text() for path in sorted(ROOT.glob("docs/**/*.md")))]
VERBS = [
    "recipes ls",
    "recipes show",
    "plan",
    "train",
    "evaluate",
    "compose",
    "compress",
    "data prepare",
    "data ls",
    "report",
    "demo",
    "bench",
    "reproduce",
    "results add",
]


def commands_of(text: str) -> list[str]:
    """Return the commands on indented lines and in backquotes, without the remarks behind them."""
    text = re.sub(r"\\ *\n +", "", text)  # a command on several lines
    lines = re.findall(r"^ +(factorized [a-z].*)$", text, flags=re.MULTILINE)
    inline = re.findall(r"`(factorized (?:train|plan|demo|data|recipes|report|compose|evaluate|bench)[^`]*)`", text)
    return [re.split(r" {2,}|#", command)[0].strip() for command in lines + inline]


def helped() -> list[str]:
    """Return the examples of all help pages, on lines as wide as they are."""
    found = []
    for verb in VERBS:
        wide = CliRunner(env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
        found += commands_of(wide.invoke(app, [*verb.split(), "--help"]).output)
    return found


COMMANDS = sorted({*helped(), *(command for text in DOCUMENTS for command in commands_of(text))})
RUNNABLE = [
    c for c in COMMANDS if re.match(r"factorized (recipes (ls|show) |plan [a-z]|data ls$)", c) and "own" not in c
]


def parse(command: str) -> str:
    """Parse a command without doing what it says; return the first thing given to its verb."""
    words = shlex.split(command)[1:]
    parsed = typer.main.get_command(app)
    while words and words[0] in getattr(parsed, "commands", {}):
        parsed = parsed.commands[words.pop(0)]  # type: ignore[attr-defined]
    parsed.make_context("factorized", list(words))
    return words[0] if words else ""


def test_there_are_commands_to_try() -> None:
    assert len(COMMANDS) > 25
    assert len(RUNNABLE) > 4
    assert all(any(command.startswith(f"factorized {verb}") for command in COMMANDS) for verb in VERBS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_given(command: str) -> None:
    if "NAME" in command and not command.endswith(("NAME", "NAME|PATH")):
        return
    first = parse(command)
    if re.match(r"(cifar|digits|tiny)[\w-]*/", first):
        assert first in recipe_names()


@pytest.mark.parametrize("command", RUNNABLE)
def test_a_command_that_needs_no_data_does_what_it_says(
    cli: Cli, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(command)[1:] if word != "NAME"]
    said = cli(*words, *(["digits/resnet8"] if "NAME" in command else []))
    assert (said.code, said.err) == (0, "")
    assert said.out


def test_the_command_for_ones_own_text_needs_no_other_text(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = [command for command in COMMANDS if "mine.txt" in command]
    files(Path("DIR"), "language")
    Path("DIR/train.txt").rename("DIR/mine.txt")
    quick = (f"--set={change}" for change in (*SMALL, *BY_TASK["language"]))
    said = cli(*shlex.split(command)[1:], *quick, "--device", "cpu")
    assert said.code == 0, said.err


def test_wrong_commands_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse("factorized train digits/resnet8 --sead 3")
