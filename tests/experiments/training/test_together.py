"""Two gloo processes on the CPU, started by torchrun, against one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from factorized.experiments.training.processes import Processes, joined_processes
from factorized.experiments.training.state import load_state
from factorized.experiments.training.train import train
from tests.experiments.training import smooth
from tests.experiments.training.small import assert_same_run, digits, metrics, state_of
from tests.experiments.training.together import STEPS, shared_recipe

ROOT = Path(__file__).parents[3]


def torchrun(folder: Path, *changes: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "tests/experiments/training/together.py", str(folder), *changes],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    with torchrun(folder) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return folder


def test_every_process_ends_the_same_way(together: Path) -> None:
    for rank in (0, 1):
        found = json.loads((together / f"rank-{rank}.json").read_text())
        assert found["whole"] == found["resumed"] == "done"
        assert found["cut in an epoch"] == found["cut after an epoch"] == "Interrupted: stopped by SIGTERM"
        assert "already holds a run" in found["again"]
        assert "rank-0" in found["again"]
        assert found["left"] == "True"


def test_one_run_after_another_joins_the_processes_again(together: Path) -> None:
    for rank in (0, 1):
        found = json.loads((together / f"rank-{rank}.json").read_text())
        assert found["in groups of its own"] == ["done", "done"]


def test_only_the_first_process_writes(together: Path) -> None:
    assert not (together / "rank-1").exists()
    names = {path.name.partition(".")[0] for path in (together / "rank-0" / "whole" / "seed-0").iterdir()}
    assert names == {"checkpoint", "events", "metrics", "model", "result"}
    result = json.loads((together / "rank-0" / "whole" / "seed-0" / "result.json").read_text())
    assert result["machine"]["processes"] == 2


def test_two_processes_end_where_one_does(together: Path, tmp_path: Path) -> None:
    train(shared_recipe(), digits(), tmp_path, device="cpu")
    alone, shared = state_of(tmp_path), state_of(together / "rank-0" / "whole")
    for name, expected in alone.network.items():
        torch.testing.assert_close(shared.network[name], expected, rtol=1e-3, atol=1e-4)
    for left, right in zip(metrics(shared.history), metrics(alone.history), strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
        assert left["accuracy"] == pytest.approx(right["accuracy"], abs=0.4)


def test_processes_stop_together_in_the_middle_of_an_epoch_and_go_on_to_the_same_bits(together: Path) -> None:
    cut, whole = state_of(together / "rank-0" / "cut"), state_of(together / "rank-0" / "whole")
    for row, other in zip(cut.history, whole.history, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-12)  # summed in another order
        row["loss"] = other["loss"]
    assert all(torch.equal(tensor, whole.network[name]) for name, tensor in cut.network.items())
    assert all(torch.equal(tensor, whole.momentum[name]) for name, tensor in cut.momentum.items())
    assert metrics(cut.history) == metrics(whole.history)


def test_every_process_drops_other_entries_and_crops_alike(together: Path) -> None:
    first, second = (json.loads((together / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first["crops"] == second["crops"]
    assert len(set(first["crops"])) == len(first["crops"]) == 2 * STEPS
    dropped = first["dropped"] + second["dropped"]
    assert len(set(dropped)) == len(dropped) == 2 * 2 * STEPS


def test_processes_with_dropout_stop_in_the_middle_of_an_epoch_and_go_on_to_the_same_bits(together: Path) -> None:
    cut, whole = (state_of(together / "rank-0" / name) for name in ("cut dropout", "dropout"))
    assert all(torch.equal(tensor, whole.network[name]) for name, tensor in cut.network.items())
    assert all(torch.equal(tensor, whole.momentum[name]) for name, tensor in cut.momentum.items())


def test_another_number_of_processes_goes_on_with_dropout(together: Path) -> None:
    changes = (f"model.name='{smooth.WITH_DROPOUT}'",)
    folder = together / "rank-0" / "dropout alone"
    assert state_of(folder).random.keys() == {"cpu", "cpu of process 0", "cpu of process 1"}
    train(shared_recipe(*changes), digits(), folder, device="cpu", resume=True, allow_other_devices=True)
    assert state_of(folder).random.keys() == {"cpu"}


def test_the_loss_of_an_epoch_that_one_process_ends_is_that_of_all_its_steps(together: Path) -> None:
    folder = together / "rank-0" / "to go on alone"
    train(shared_recipe(), digits(), folder, device="cpu", resume=True, allow_other_devices=True)
    alone, whole = state_of(folder), state_of(together / "rank-0" / "whole")
    assert len(alone.ran_on) == 2
    for row, other in zip(alone.history, whole.history, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_processes_stop_together_after_an_epoch(together: Path) -> None:
    state = state_of(together / "rank-0" / "epoch")
    assert (state.epoch, state.step, len(state.history)) == (1, 0, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_told_to_stop_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, number: int) -> None:
    changes = ("schedule.epochs=12",)
    checkpoint = tmp_path / "rank-0" / "seed-0" / "checkpoint.pt"
    with torchrun(tmp_path, *changes) as process:
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=120)
    assert process.returncode != 0
    assert {(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)} == {f"stopped by {number.name}"}
    assert 1 <= load_state(checkpoint.parent).epoch < 12
    with torchrun(tmp_path, *changes) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    with torchrun(tmp_path / "whole", *changes) as process:
        process.communicate(timeout=300)
    assert_same_run(tmp_path / "rank-0", tmp_path / "whole" / "rank-0")


def test_one_process_alone_joins_nothing() -> None:
    with joined_processes("cpu") as processes:
        assert processes == Processes(torch.device("cpu"), rank=0, count=1)
        assert processes.is_first
        assert processes.total(torch.tensor(3)) == 3.0
        assert processes.from_first(lambda: "made") == "made"
        assert not torch.distributed.is_initialized()
