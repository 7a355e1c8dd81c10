"""What verbs print: lines, tables, and the bar of long work beside them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from factorized.experiments.cli.console import Bar, console, plain_table, progress_bar, say


def test_nothing_is_shown_between_stages_so_that_lines_stay_where_they_are_printed() -> None:
    progress = Progress(console=Console(file=io.StringIO(), force_terminal=True), transient=True)
    bar = Bar(progress)
    assert not progress.live.is_started
    for stage in ("choosing ranks", "calibrating", "calibrating"):
        for done in (1, 2):
            bar(stage, done, 3)
            assert progress.live.is_started
            assert [(task.description, task.completed, task.total) for task in progress.tasks] == [(stage, done, 3)]
        bar(stage, 3, 3)
        assert not progress.live.is_started
        assert not progress.tasks


def test_one_stage_within_another_ends_before_it() -> None:
    progress = Progress(console=Console(file=io.StringIO(), force_terminal=True), transient=True)
    bar = Bar(progress)
    bar("layers", 1, 2)
    bar("batches", 4, 4)
    assert progress.live.is_started
    assert [task.description for task in progress.tasks] == ["layers"]
    bar("layers", 2, 2)
    assert not progress.live.is_started


def test_a_stage_without_an_end_is_shown_until_the_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress_bar() as bar:
        bar("reading", 10, 0)
        bar("reading", 20, 0)
        (task,) = bar.progress.tasks
        assert (task.completed, task.total) == (20, None)
        assert bar.progress.live.is_started
    assert not bar.progress.live.is_started


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    say("out/net[small]/seed-0")
    table = plain_table("recipe")
    table.add_row("own/net[bold]")
    console().print(table)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        "out/net[small]/seed-0",
        "recipe",
        "own/net[bold]",
    ]
