"""Jobs by submitit, in its executor for one machine."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import psutil
import pytest

from factorized.experiments.reproduce.on_slurm import SlurmEngine
from tests.experiments.reproduce.small_table import TABLE, jobs, runs_in, wait_for_epochs

LONG = TABLE.replace("epochs = 4, milestones = [2]", "epochs = 60")


def engine(folder: Path) -> SlurmEngine:
    return SlurmEngine(folder / "logs", cluster="local", gpus=0, settings={"timeout_min": 5})


@pytest.mark.nightly
def test_every_seed_is_a_job_of_its_own_and_an_error_is_its_outcome(tmp_path: Path) -> None:
    good = jobs(tmp_path, seeds=2, length=1)[1]
    bad = jobs(tmp_path, length=1, text=TABLE.replace("[columns]", "optimizer.lr = 1e30\n[columns]"))[0]
    outcomes = {(outcome.job.name, outcome.job.seeds): outcome for outcome in engine(tmp_path).run([good, bad])}
    assert set(outcomes) == {(good.name, (0,)), (good.name, (1,)), (bad.name, (0,))}
    assert "the training loss is nan" in (outcomes[bad.name, (0,)].error or "")
    assert [outcomes[good.name, (seed,)].results[0]["seed"] for seed in (0, 1)] == [0, 1]
    assert {run.name for run in runs_in(tmp_path / "out")} == {good.name}


@pytest.mark.nightly
def test_a_job_whose_time_is_over_is_queued_again_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (low_rank,) = [job for job in jobs(tmp_path, text=LONG) if job.name.endswith("fd")]
    told: list[int] = []

    def end_its_time() -> None:
        wait_for_epochs(tmp_path / "out", runs=1)
        for child in psutil.Process().children(recursive=True):
            if "submitit.core._submit" in child.cmdline():
                told.append(child.pid)
                child.send_signal(signal.SIGUSR2)  # as Slurm does before it ends a job

    threading.Thread(target=end_its_time, daemon=True).start()
    (outcome,) = engine(tmp_path).run([low_rank])
    assert told
    assert outcome.error is None
    (result,) = outcome.results
    assert [row["epoch"] for row in result["history"]] == list(range(1, 61))
    events = list(Path(low_rank.folder).rglob("events.out.tfevents.*"))
    assert len(events) == 2  # one of each process that trained it


def test_a_parameter_that_submitit_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--slurm: .*wrong_word.*; see submitit's parameters"):
        SlurmEngine(tmp_path, cluster="local", settings={"wrong_word": 1})
