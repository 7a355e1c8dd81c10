"""Jobs on this machine, in this process and in several."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from factorized.experiments.reproduce.engine import carry_out
from factorized.experiments.reproduce.job import Job, Outcome
from factorized.experiments.reproduce.local import LocalEngine
from factorized.experiments.training.progress import Reporter
from tests.experiments.reproduce.small_table import (
    TABLE,
    check_that_a_signal_lets_runs_save_themselves,
    jobs,
    runs_in,
    wait_for_epochs,
)


def engine(*devices: str) -> LocalEngine:
    return LocalEngine(devices, lambda: Reporter(quiet=True))


def test_jobs_run_one_after_the_other_and_a_failed_one_does_not_end_the_rest(tmp_path: Path) -> None:
    bad = jobs(tmp_path, length=1, text=TABLE.replace("[columns]", "optimizer.lr = 1e30\n[columns]"))[0]
    good = jobs(tmp_path, length=1)[1]
    told: list[Outcome] = []
    failed = carry_out([[bad, good]], engine("cpu"), told.append)
    assert [outcome.job for outcome in told] == [bad, good]
    assert [outcome.job for outcome in failed] == [bad]
    assert [run.name for run in runs_in(tmp_path / "out")] == [good.name]


def test_a_result_from_a_machine_with_another_disk_is_written_here(tmp_path: Path) -> None:
    job = jobs(tmp_path, length=1)[0]
    (outcome,) = engine("cpu").run([job])

    class Elsewhere:
        def run(self, jobs: list[Job]) -> list[Outcome]:
            return [outcome]

    (Path(job.folder) / "seed-0/result.json").unlink()
    carry_out([[job]], Elsewhere(), lambda outcome: None)  # type: ignore[arg-type]
    (run,) = runs_in(tmp_path / "out")
    assert run.result["history"] == outcome.results[0]["history"]


@pytest.mark.nightly
def test_each_device_has_a_process_and_all_jobs_end(tmp_path: Path) -> None:
    both = jobs(tmp_path, seeds=2, length=1)
    outcomes = list(engine("cpu", "cpu").run(both))
    assert {outcome.job.name for outcome in outcomes} == {job.name for job in both}
    assert all(outcome.error is None for outcome in outcomes)
    assert len(runs_in(tmp_path / "out")) == 4


@pytest.mark.nightly
def test_a_signal_to_the_engine_stops_its_processes_after_they_have_saved_themselves(tmp_path: Path) -> None:
    check_that_a_signal_lets_runs_save_themselves(engine("cpu", "cpu"), tmp_path)


@pytest.mark.nightly
def test_a_killed_process_costs_the_runs_under_way_and_no_others(tmp_path: Path) -> None:
    text = TABLE.replace("epochs = 4, milestones = [2]", "epochs = 60")
    every = [one for job in jobs(tmp_path, seeds=3, text=text) for one in job.by_seed()]

    def kill_one() -> None:
        wait_for_epochs(tmp_path / "out", runs=2)
        next(child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())).kill()

    threading.Thread(target=kill_one, daemon=True).start()
    outcomes = list(engine("cpu", "cpu").run(every))
    assert sorted(outcome.error is None for outcome in outcomes) == [False] * 2 + [True] * 4
    assert {outcome.error for outcome in outcomes if outcome.error} == {
        "its process, or one beside it, was killed; give the same command once more"
    }
    assert len(runs_in(tmp_path / "out")) == 4
