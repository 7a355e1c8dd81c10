from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from factorized.experiments.training.progress import REFRESH, Reporter
from factorized.experiments.training.train import train
from tests.experiments.training.small import digits, recipe

ROW = {"epoch": 1, "loss": 1.25, "test_accuracy": 87.5, "images_per_second": 4321.0}


def shown_in(terminal: bool, quiet: bool = False, width: int = 160) -> tuple[Reporter, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, legacy_windows=False, color_system=None)
    return Reporter(console, quiet=quiet), file


def run(reporter: Reporter, done: int = 0) -> None:
    with reporter:
        reporter.begin("digits seed 3", epochs=2, steps=40, done=done)
        for step in range(done, 40):
            reporter.step(0, step, torch.tensor(2.0 * (step + 1)), 1234.0)
        reporter.epoch(ROW)
        for step in range(40):
            reporter.step(1, step, torch.tensor(1.0 * (step + 1)), 1234.0)
            if step + 1 == REFRESH:
                reporter.progress.refresh()


def test_a_terminal_sees_a_bar_with_epoch_loss_accuracy_speed_and_time_left() -> None:
    reporter, file = shown_in(terminal=True)
    run(reporter)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert re.search(r"digits seed 3 .*━.* epoch 2/2  loss 1\.000  test 87\.50 %  1,234 images/s .*\d:\d\d", text)
    assert reporter.progress.tasks[0].completed == 80


def test_a_terminal_of_80_columns_sees_all_of_it_on_two_lines() -> None:
    reporter, file = shown_in(terminal=True, width=80)
    name = "tiny-imagenet/resnet32x2-lowrank-0.15-si-fd seed 0"
    with reporter:
        reporter.begin(name, epochs=200, steps=390, done=0)
        reporter.epoch({**ROW, "epoch": 199, "images_per_second": 43210.0})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    first, second = (line.rpartition("\r")[2] for line in text.split("\n")[-3:-1])
    assert re.fullmatch(rf"{name} +[━╸╺ ]+ [\d:-]+ *", first)
    assert second.rstrip() == "epoch 199/200  loss 1.250  test 87.50 %  43,210 images/s"


@pytest.mark.parametrize(("terminal", "width"), [(True, 160), (True, 80), (False, 160)])
def test_brackets_in_a_name_are_shown_as_they_are(terminal: bool, width: int) -> None:
    reporter, file = shown_in(terminal, width=width)
    with reporter:
        reporter.begin("own/net[small] seed 0", epochs=2, steps=40, done=0)
        reporter.epoch(ROW)
    assert "own/net[small] seed 0" in file.getvalue()


def test_the_bar_is_where_the_run_is_after_going_on_in_the_middle_of_an_epoch() -> None:
    reporter, _ = shown_in(terminal=True)
    with reporter:
        reporter.begin("digits", epochs=2, steps=40, done=33)
        assert reporter.progress.tasks[0].completed == 33
        for step in range(33, 40):
            reporter.step(0, step, torch.tensor(1.0), 1.0)
        assert reporter.progress.tasks[0].completed == 40


def test_the_loss_is_read_from_the_device_only_now_and_then() -> None:
    class Counted(torch.Tensor):
        reads = 0

        def item(self) -> float:
            type(self).reads += 1
            return 1.0

    loss = torch.zeros(()).as_subclass(Counted)
    for terminal, expected in ((True, 40 // REFRESH), (False, 0)):
        reporter, _ = shown_in(terminal)
        Counted.reads = 0
        with reporter:
            reporter.begin("digits", epochs=1, steps=40, done=0)
            for step in range(40):
                reporter.step(0, step, loss, 1.0)
        assert Counted.reads == expected


def test_a_pipe_gets_one_plain_line_an_epoch(tmp_path: Path) -> None:
    reporter, file = shown_in(terminal=False)
    train(recipe(), digits(), tmp_path, seeds=(0, 4), device="cpu", reporter=reporter)
    lines = file.getvalue().strip().splitlines()
    assert len(lines) == 4
    for line, (seed, epoch) in zip(lines, ((0, 1), (0, 2), (4, 1), (4, 2)), strict=True):
        start = rf"digits/resnet8-lowrank-0\.1-si-fd seed {seed}  epoch {epoch}/2  loss \d\.\d\d\d"
        assert re.fullmatch(start + r"  test \d+\.\d\d %  [\d,]+ images/s", line)
    assert "\x1b" not in file.getvalue()


def test_an_epoch_without_a_test_shows_the_accuracy_before_it_if_any(tmp_path: Path) -> None:
    reporter, file = shown_in(terminal=False)
    with reporter:
        reporter.begin("digits", epochs=3, steps=1, done=0)
        reporter.epoch({"epoch": 1, "loss": 1.0, "images_per_second": 1.0})
        reporter.epoch({**ROW, "epoch": 2})
        reporter.epoch({"epoch": 3, "loss": 1.0, "images_per_second": 1.0})
    assert ["test 87.50 %" in line for line in file.getvalue().splitlines()] == [False, True, True]


def test_quiet_shows_nothing_on_a_terminal_or_a_pipe() -> None:
    for terminal in (True, False):
        reporter, file = shown_in(terminal, quiet=True)
        run(reporter)
        assert file.getvalue() == ""


def test_layers_that_are_being_decomposed_have_a_bar_until_all_are() -> None:
    reporter, file = shown_in(terminal=True)
    with reporter:
        reporter.decomposing(3, 8)
        reporter.progress.refresh()
        assert len(reporter.progress.tasks) == 1
        reporter.decomposing(8, 8)
        assert reporter.progress.tasks == []
    assert re.search(r"decomposing .*3 of 8 layers", file.getvalue())


def test_training_reports_decompositions_that_take_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, int]] = []
    monkeypatch.setattr(Reporter, "decomposing", lambda self, done, total: heard.append((done, total)))
    monkeypatch.setattr("factorized.experiments.training.trainer.late", lambda show: show)
    train(recipe(), digits(), tmp_path, device="cpu", reporter=Reporter(quiet=True))
    assert heard
    assert heard[-1][0] == heard[-1][1]
