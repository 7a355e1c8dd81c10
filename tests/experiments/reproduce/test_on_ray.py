"""Jobs on a real local Ray cluster, a killed worker and a lost cluster included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from factorized.experiments.cli.main import main
from factorized.experiments.reproduce.job import Job, Outcome
from factorized.experiments.reproduce.on_ray import RayEngine
from tests.experiments.reproduce.small_table import (
    TABLE,
    check_that_a_signal_lets_runs_save_themselves,
    jobs,
    runs_in,
    wait_for_epochs,
    write_table,
)

ROOT = Path(__file__).parents[3]
LONG = TABLE.replace("epochs = 4, milestones = [2]", "epochs = 60")


@pytest.fixture
def cluster() -> Iterator[None]:
    """A cluster with room for two tasks; its workers find this package where the tests do."""
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(
        num_cpus=2,
        num_gpus=1,  # as Ray counts them; no task of these tests uses it
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env=environment,
    )
    try:
        yield
    finally:
        ray.shutdown()


def workers() -> list[psutil.Process]:
    """Return the processes of this test's cluster that train."""
    return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("ray::run_job")]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # Ray leaves files and processes to the garbage collector
def test_a_killed_worker_is_replaced_and_its_run_goes_on_from_its_checkpoint(cluster: None, tmp_path: Path) -> None:
    (low_rank,) = [job for job in jobs(tmp_path, text=LONG) if job.name.endswith("fd")]
    killed: list[int] = []

    def kill_one() -> None:
        wait_for_epochs(tmp_path / "out", runs=1)
        for worker in workers():
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    (outcome,) = RayEngine(gpus=0).run([low_rank])
    killer.join()
    assert killed
    assert outcome.error is None
    (result,) = outcome.results
    assert [row["epoch"] for row in result["history"]] == list(range(1, 61))
    events = list(Path(low_rank.folder).rglob("events.out.tfevents.*"))
    assert len(events) == 2  # one of each process that trained it
    assert len(runs_in(tmp_path / "out")) == 1


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_every_seed_has_its_share_of_a_gpu(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell_resources(job: Job, device: str | None) -> Outcome:
        resources = ray.get_runtime_context().get_assigned_resources()
        return Outcome(job, [], f"{device}, {resources.get('GPU', 0.0):g} GPU, {resources['CPU']:g} CPU")

    monkeypatch.setattr("factorized.experiments.reproduce.on_ray.run_job", tell_resources)
    both, one = (jobs(tmp_path, seeds=seeds)[0] for seeds in (2, 1))
    assert [outcome.error for outcome in RayEngine(gpus=0.5).run([both])] == ["cuda, 0.5 GPU, 1 CPU"] * 2
    assert [outcome.error for outcome in RayEngine(cpus=2).run([one])] == ["cuda, 1 GPU, 2 CPU"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_signal_to_the_driver_lets_the_tasks_save_themselves(cluster: None, tmp_path: Path) -> None:
    check_that_a_signal_lets_runs_save_themselves(RayEngine(gpus=0), tmp_path)


@pytest.mark.nightly
def test_a_lost_cluster_leaves_everything_finished_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = str(write_table(tmp_path, LONG))
    command = [sys.executable, "-m", "factorized", "reproduce", table, "--seeds", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    process = subprocess.Popen(
        [*command, "--engine", "ray", "--cpus", "2"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("done, "):
                break
        for child in psutil.Process(process.pid).children(recursive=True):
            if child.name() in ("gcs_server", "raylet") or child.name().startswith("ray::"):
                child.kill()
        assert process.wait(timeout=200) != 0
    finished = {run.path: run.path.stat().st_mtime_ns for run in runs_in(tmp_path / "out")}
    assert 1 <= len(finished) < 4
    assert main(["reproduce", table, "--seeds", "2", "--device", "cpu", "--quiet"]) == 0
    assert len(runs_in(tmp_path / "out")) == 4
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


@pytest.mark.parametrize(("address", "tried"), [("auto", "auto"), (None, "local")])
def test_a_cluster_that_refuses_the_connection_leads_to_its_token(
    address: str | None, tried: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str, **_: object) -> None:
        raise ConnectionError(f"Failed to connect to {address}")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ValueError, match=rf"--address {tried}: Failed to connect to {tried}; .* RAY_AUTH_MODE=token"):
        list(RayEngine(address=address).run([]))
