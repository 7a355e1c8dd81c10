"""Two gloo processes on the CPU, started by torchrun, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(scenario: str, folder: Path, worker: str = "tests/distributed/worker.py") -> dict[str, Any]:
    out = folder / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, worker, scenario, str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "flambe"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_end_where_one_does(kind: str, optimizer: str, tmp_path: Path) -> None:
    assert run(f"{kind}-{optimizer}", tmp_path)["difference"] < 1e-12


@pytest.mark.parametrize("scenario", ["ddp-sgd-tensors", "fsdp-adamw-tensors", "fsdp-flambe-tensors"])
def test_tensors_too_end_where_one_process_does(scenario: str, tmp_path: Path) -> None:
    assert run(scenario, tmp_path)["difference"] < 1e-12


def test_the_sharded_decay_moves_rank_by_rank_matrices_only(tmp_path: Path) -> None:
    result = run("count", tmp_path)
    assert 0 < result["bytes"] <= result["allowed"]


def test_a_sharded_model_is_saved_whole(tmp_path: Path) -> None:
    assert run("checkpoint", tmp_path)["difference"] == 0


def test_factorizing_a_sharded_model_says_what_to_do_instead(tmp_path: Path) -> None:
    result = run("late", tmp_path)
    assert "before fully_shard" in str(result["error"])
    assert result["untouched"] == "True"


def test_factorizing_a_wrapped_model_says_to_wrap_it_afterwards(tmp_path: Path) -> None:
    assert "wrap it afterwards" in str(run("wrapped", tmp_path)["error"])
