"""Jobs: finished seeds stay, a stopped one is resumed, and an error is an outcome."""

from __future__ import annotations

import json
import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.shorten import shorten
from factorized.experiments.reproduce.data import data_checksum
from factorized.experiments.reproduce.job import Job, run_job
from factorized.experiments.reproduce.runs import read_runs
from factorized.experiments.training.folder import FAILURE
from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.trainer import Trainer
from tests.experiments.reproduce.small_table import TABLE, jobs
from tests.experiments.training.small import Signals, assert_same_run


def test_a_job_stopped_in_its_second_seed_keeps_the_first_and_resumes_to_the_same_end(tmp_path: Path) -> None:
    whole, stopped = (replace(jobs(tmp_path, seeds=2, length=2)[1], folder=str(tmp_path / name)) for name in "ab")
    assert run_job(whole, "cpu").error is None

    class InSecondSeed(Signals):
        def begin(self, title: str, epochs: int, steps: int, done: int) -> None:
            self.at = (1, 2) if title.endswith("seed 1") else (9, 9)
            super().begin(title, epochs, steps, done)

    with pytest.raises(Interrupted, match="SIGTERM"):
        run_job(stopped, "cpu", InSecondSeed(signal.SIGTERM, epoch=9, step=9))
    first = tmp_path / "b/seed-0/result.json"
    before = first.stat().st_mtime_ns
    assert not (tmp_path / "b/seed-1/result.json").exists()
    outcome = run_job(stopped, "cpu")
    assert [result["seed"] for result in outcome.results] == [0, 1]
    assert first.stat().st_mtime_ns == before
    assert_same_run(tmp_path / "b", tmp_path / "a", seed=1)


def test_a_finished_run_on_text_is_not_trained_again(tmp_path: Path) -> None:
    recipe = shorten(load_any_recipe("translation/numbers"), 1)
    job = Job(recipe.to_dict(), (0,), str(tmp_path), None, data_checksum(recipe, None))
    (trained,) = run_job(job, "cpu").results
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert run_job(job, "cpu").results == [trained]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_signal_while_data_are_read_stops_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from factorized.experiments.reproduce import job as module

    job, read = jobs(tmp_path, length=1)[0], module.images_of

    def interrupted(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "images_of", interrupted)
    with pytest.raises(Interrupted):
        run_job(job, "cpu")
    assert not Path(job.folder).exists()


def test_a_signal_after_the_last_step_stops_before_the_next_job_and_keeps_the_result(tmp_path: Path) -> None:
    class AfterLastStep(Reporter):
        def epoch(self, row: dict[str, Any]) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    job = jobs(tmp_path, length=1)[0]
    with pytest.raises(Interrupted, match="SIGINT"):
        run_job(job, "cpu", AfterLastStep(quiet=True))
    assert (Path(job.folder) / "seed-0/result.json").is_file()


def test_an_error_ends_the_job_and_is_left_beside_its_run(tmp_path: Path) -> None:
    text = TABLE.replace("[columns]", "optimizer.lr = 1e30\n[columns]")
    job = jobs(tmp_path, length=1, text=text)[0]
    outcome = run_job(job, "cpu")
    assert outcome.results == []
    assert outcome.error is not None
    assert "the training loss is nan" in outcome.error
    left = json.loads((Path(job.folder) / "seed-0" / FAILURE).read_text())
    assert (left["recipe"]["name"], left["seed"], left["error"]) == (job.name, 0, outcome.error)
    (unfinished,) = read_runs([tmp_path / "out"]).unfinished
    assert unfinished.error == outcome.error


def test_a_run_that_failed_and_is_stopped_later_is_not_called_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AfterFirstStep(Reporter):
        def step(self, epoch: int, step: int, loss_sum: Tensor, images_per_second: float) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    def broken(self: Trainer, state: object) -> None:
        raise RuntimeError("out of memory")

    job = jobs(tmp_path, length=1)[0]
    with monkeypatch.context() as changed:
        changed.setattr(Trainer, "_begin", broken)
        assert run_job(job, "cpu").error == "RuntimeError: out of memory"
    with pytest.raises(Interrupted):
        run_job(job, "cpu", AfterFirstStep(quiet=True))
    (unfinished,) = read_runs([tmp_path / "out"]).unfinished
    assert unfinished.error is None


def test_a_damaged_result_ends_its_job_and_no_other(tmp_path: Path) -> None:
    job = jobs(tmp_path, seeds=2, length=1)[0]
    assert run_job(job, "cpu").error is None
    damaged = Path(job.folder) / "seed-1" / "result.json"
    damaged.write_text("{")
    outcome = run_job(job, "cpu")
    assert [result["seed"] for result in outcome.results] == [0]
    assert outcome.error is not None
    assert f"{damaged}: not valid JSON" in outcome.error
    assert outcome.error.endswith("; delete it and train the run again")
    assert damaged.read_text() == "{"
    damaged.unlink()
    assert [result["seed"] for result in run_job(job, "cpu").results] == [0, 1]


def test_a_seed_that_fails_leaves_those_that_take_turns_with_it_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Trainer._draw

    def broken(self: Trainer, seed: int) -> dict[str, Tensor]:
        if seed == 1:
            raise RuntimeError("the GPU is on fire")
        return draw(self, seed)

    monkeypatch.setattr(Trainer, "_draw", broken)
    job = jobs(tmp_path, seeds=3, length=1)[0]
    outcome = run_job(job, "cpu", at_once=3)
    assert [result["seed"] for result in outcome.results] == [0, 2]
    assert outcome.error is not None
    assert "seed 1: RuntimeError: the GPU is on fire" in outcome.error
    left = json.loads((Path(job.folder) / "seed-1" / FAILURE).read_text())
    assert (left["seed"], left["error"]) == (1, "RuntimeError: the GPU is on fire")
    assert not (Path(job.folder) / "seed-2" / FAILURE).exists()


def test_a_stop_survives_the_way_to_another_process() -> None:
    stopped = pickle.loads(pickle.dumps(Interrupted(signal.SIGTERM)))
    assert (stopped.number, stopped.exit_code, str(stopped)) == (15, 143, "stopped by SIGTERM")
