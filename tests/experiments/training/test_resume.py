from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.training.interrupt import Interrupted, StopRequest
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.result import read_result
from factorized.experiments.training.state import FILE
from factorized.experiments.training.train import train
from factorized.experiments.training.trainer import Trainer
from tests.experiments.training.small import STEPS, Signals, assert_same_run, digits, metrics, recipe, state_of

ROOT = Path(__file__).parents[3]
LONG = ("schedule.epochs=20", "run.evaluate_every=5", "run.checkpoint_every=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(recipe(), digits(), folder, device="cpu")
    return folder


def driver(folder: Path, *changes: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "tests/experiments/training/driver.py",
        str(folder),
        str(torch.get_num_threads()),
        *changes,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_rows(process: subprocess.Popen[str], folder: Path, rows: int) -> None:
    path = folder / "seed-0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not path.is_file() or len(path.read_text().splitlines()) < rows:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.005)


def kill_somewhere(folder: Path, rows: int, changes: tuple[str, ...]) -> None:
    with driver(folder, *changes) as process:
        wait_for_rows(process, folder, rows)
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert not (folder / "seed-0" / "result.json").exists()


def test_a_run_killed_at_a_random_moment_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    train(recipe(*LONG), digits(), tmp_path / "whole", device="cpu")
    kill_somewhere(tmp_path / "killed", random.randrange(1, 6), LONG)
    train(recipe(*LONG), digits(), tmp_path / "killed", device="cpu", resume=True)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_run_killed_before_its_first_checkpoint_goes_on_from_the_start(tmp_path: Path) -> None:
    train(recipe(*LONG), digits(), tmp_path / "whole", device="cpu")
    folder = tmp_path / "killed" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text((tmp_path / "whole/seed-0/metrics.jsonl").read_text().splitlines()[0] + "\n")
    train(recipe(*LONG), digits(), tmp_path / "killed", device="cpu", resume=True)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.parametrize("change", ["data.place=loader", "decay.record_norms=true", "optimizer.clip=0.5"])
def test_a_run_killed_again_and_again_goes_on_to_the_same_bits(tmp_path: Path, change: str) -> None:
    changes = (*LONG, "schedule.epochs=60", change)
    train(recipe(*changes), digits(), tmp_path / "whole", device="cpu")
    for round_ in range(4):
        kill_somewhere(tmp_path / "killed", 4 * round_ + random.randrange(1, 8), changes)
    with driver(tmp_path / "killed", *changes) as process:
        assert process.wait(120) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "epoch", "step"),  # the stop is taken one step later: after the last one too
    [(signal.SIGTERM, 0, 0), (signal.SIGINT, 0, STEPS - 2), (signal.SIGTERM, 1, STEPS - 2), (signal.SIGINT, 1, 1)],
)
def test_a_signal_saves_the_run_in_the_middle_of_an_epoch_and_it_goes_on_to_the_same_bits(
    whole: Path, tmp_path: Path, number: int, epoch: int, step: int
) -> None:
    with pytest.raises(Interrupted, match=signal.Signals(number).name) as stopped:
        train(recipe(), digits(), tmp_path, device="cpu", reporter=Signals(number, epoch=epoch, step=step))
    assert stopped.value.exit_code == 128 + number
    state = state_of(tmp_path)
    assert (state.epoch, state.step, len(state.history)) == (epoch, step + 2, epoch)
    assert not (tmp_path / "seed-0" / "result.json").exists()
    [result] = train(recipe(), digits(), tmp_path, device="cpu", resume=True)
    assert_same_run(tmp_path, whole)
    assert result["accuracy"] == state_of(whole).history[-1]["test_accuracy"]


@pytest.mark.parametrize("change", ["data.place=loader", "decay.record_norms=true", "optimizer.clip=0.5"])
def test_a_stopped_run_goes_on_to_the_same_bits_with(change: str, tmp_path: Path) -> None:
    train(recipe(change), digits(), tmp_path / "whole", device="cpu")
    reporter = Signals(signal.SIGTERM, epoch=1, step=1)
    with pytest.raises(Interrupted):
        train(recipe(change), digits(), tmp_path / "cut", device="cpu", reporter=reporter)
    train(recipe(change), digits(), tmp_path / "cut", device="cpu", resume=True)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_run_stopped_after_the_last_step_of_an_epoch_records_the_learning_rate_of_that_step(tmp_path: Path) -> None:
    linear = recipe("schedule.shape=linear")
    train(linear, digits(), tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        train(
            linear, digits(), tmp_path / "cut", device="cpu", reporter=Signals(signal.SIGTERM, epoch=1, step=STEPS - 2)
        )
    assert state_of(tmp_path / "cut").step == STEPS
    train(linear, digits(), tmp_path / "cut", device="cpu", resume=True)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_run_is_resumed_while_the_processes_that_read_its_images_still_end(tmp_path: Path) -> None:
    streamed = recipe("data.place=loader", "data.workers=1")
    with pytest.raises(Interrupted) as stopped:
        train(streamed, digits(), tmp_path, device="cpu", reporter=Signals(signal.SIGTERM, epoch=0, step=1))
    assert stopped.tb is not None  # which holds on to the trainer and its reading process
    assert multiprocessing.active_children()
    train(streamed, digits(), tmp_path, device="cpu", resume=True)
    assert state_of(tmp_path).epoch == 2


def test_a_signal_after_an_epoch_saves_even_where_no_checkpoint_is_due(tmp_path: Path) -> None:
    seldom = recipe("run.checkpoint_every=10")
    with pytest.raises(Interrupted):
        train(seldom, digits(), tmp_path, device="cpu", reporter=Signals(signal.SIGTERM, epoch=0, step=None))
    assert (state_of(tmp_path).epoch, state_of(tmp_path).step) == (1, 0)


def test_a_signal_after_the_last_epoch_is_too_late_to_stop_anything(whole: Path, tmp_path: Path) -> None:
    train(recipe(), digits(), tmp_path, device="cpu", reporter=Signals(signal.SIGTERM, epoch=1, step=None))
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_stops_at_once_and_keeps_the_checkpoint_before(tmp_path: Path, numbers: tuple[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), digits(), tmp_path, device="cpu", reporter=Signals(*numbers, epoch=1, step=1))
    assert (state_of(tmp_path).epoch, state_of(tmp_path).step) == (1, 0)


def test_signals_mean_what_they_meant_before_once_training_ends(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Interrupted):
        train(recipe(), digits(), tmp_path, device="cpu", reporter=Signals(signal.SIGINT, epoch=0, step=0))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_told_to_stop_ends_with_the_code_of_the_signal(tmp_path: Path, number: int) -> None:
    with driver(tmp_path, *LONG) as process:
        wait_for_rows(process, tmp_path, 3)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert state_of(tmp_path).epoch >= 3


def test_resuming_a_finished_run_returns_its_result_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [before] = train(recipe(), digits(), tmp_path, device="cpu")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(Trainer, "_begin_epoch", None)
    [after] = train(recipe(), digits(), tmp_path, device="cpu", resume=True)
    assert after == before
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == files


def test_a_run_killed_between_its_last_checkpoint_and_its_result_writes_it_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [before] = train(recipe(), digits(), tmp_path, device="cpu")
    (tmp_path / "seed-0" / "result.json").unlink()
    monkeypatch.setattr(Trainer, "_begin_epoch", None)
    [after] = train(recipe(), digits(), tmp_path, device="cpu", resume=True)
    assert (tmp_path / "seed-0" / "result.json").is_file()
    before.pop("files"), after.pop("files")  # weights are written under a new name each time
    assert after == before


def test_resuming_a_finished_run_without_its_checkpoint_trains_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "seed-0" / FILE).unlink()
    monkeypatch.setattr(Trainer, "_begin", lambda *_: pytest.fail("it was trained again"))
    result = train(recipe(), digits(), folder, device="cpu", resume=True)[0]
    assert result == read_result(whole / "seed-0")
    with pytest.raises(ValueError, match=r"holds a run with optimizer\.lr = 0\.\d+, and this recipe says 0\.7"):
        train(recipe("optimizer.lr=0.7"), digits(), folder, device="cpu", resume=True)


def test_resuming_several_seeds_goes_on_with_those_that_have_not_ended(tmp_path: Path) -> None:
    train(recipe(), digits(), tmp_path / "whole", seeds=(0, 1, 2), device="cpu")
    cut = tmp_path / "cut"
    train(recipe(), digits(), cut, seeds=(0,), device="cpu")
    reporter = Signals(signal.SIGTERM, epoch=1, step=0)
    with pytest.raises(Interrupted):
        train(recipe(), digits(), cut, seeds=(1,), device="cpu", reporter=reporter)
    results = train(recipe(), digits(), cut, seeds=(0, 1, 2), device="cpu", resume=True)
    assert [result["seed"] for result in results] == [0, 1, 2]
    for seed in (0, 1, 2):
        assert_same_run(cut, tmp_path / "whole", seed)


def test_resuming_where_there_is_nothing_is_refused_with_the_nearest_runs(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out" / "digits" / "small")
    for folder, near in (("ot/digits/small", "out/digits/small"), ("out/digits/smal", "out/digits/small")):
        with pytest.raises(ValueError, match=rf"nothing to resume in .*{folder}/seed-0; there are runs in .*{near}"):
            train(recipe(), digits(), tmp_path / folder, device="cpu", resume=True)
        assert not (tmp_path / folder).exists()
    with pytest.raises(ValueError, match=r"small/seed-1; there are runs in .*small/seed-0\. .*--auto-resume"):
        train(recipe(), digits(), tmp_path / "out/digits/small", seeds=(1,), device="cpu", resume=True)


def test_resuming_automatically_starts_where_there_is_nothing_and_goes_on_where_there_is(
    whole: Path, tmp_path: Path
) -> None:
    reporter = Signals(signal.SIGTERM, epoch=1, step=1)
    with pytest.raises(Interrupted):
        train(recipe(), digits(), tmp_path, device="cpu", resume="auto", reporter=reporter)
    assert state_of(tmp_path).epoch == 1
    train(recipe(), digits(), tmp_path, device="cpu", resume="auto")
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("optimizer.lr=0.05", "optimizer.lr = 0.1, and this recipe says 0.05"),
        ("schedule.epochs=3", "schedule.epochs = 2, and this recipe says 3"),
        ("run.batch=64", "run.batch = 128, and this recipe says 64"),
        ("factorize.ratio=0.2", "factorize.ratio = 0.1, and this recipe says 0.2"),
    ],
)
def test_resuming_with_another_recipe_names_the_field(whole: Path, change: str, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        train(recipe(change), digits(), whole, device="cpu", resume=True)


def test_resuming_on_other_images_or_with_another_seed_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a run on other data"):
        train(recipe(), digits(511), whole, device="cpu", resume=True)
    (tmp_path / "seed-7").symlink_to(whole / "seed-0")
    with pytest.raises(ValueError, match="a run of seed 0, not 7"):
        train(recipe(), digits(), tmp_path, seeds=(7,), device="cpu", resume=True)


def test_metrics_hold_one_row_per_epoch_after_a_kill_between_row_and_checkpoint(whole: Path, tmp_path: Path) -> None:
    reporter = Signals(signal.SIGTERM, epoch=1, step=0)
    with pytest.raises(Interrupted):
        train(recipe(), digits(), tmp_path, device="cpu", reporter=reporter)
    path = tmp_path / "seed-0" / "metrics.jsonl"
    path.write_text(path.read_text() * 2)  # as if the row of another epoch had been written, and no checkpoint
    [result] = train(recipe(), digits(), tmp_path, device="cpu", resume=True)
    assert len(path.read_text().splitlines()) == 2
    assert metrics(result["history"]) == metrics(state_of(whole).history)


def test_a_run_outside_the_main_thread_leaves_signals_alone(whole: Path, tmp_path: Path) -> None:
    handlers = []

    class Watch(Reporter):
        def epoch(self, row: dict[str, Any]) -> None:
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(threads)
        train(recipe(), digits(), tmp_path, device="cpu", reporter=Watch(quiet=True))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before, before]
    assert_same_run(tmp_path, whole)


def test_a_signal_that_comes_twice_at_once_is_one_where_a_launcher_passes_signals_on() -> None:
    with StopRequest(patience=60) as stop:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert stop.number == signal.SIGINT


def test_a_signal_that_came_too_late_for_one_run_stops_what_comes_after_it() -> None:
    with StopRequest() as outer:
        outer.check()
        with StopRequest():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"):
            outer.check()
