"""Two gloo processes on the CPU, started by torchrun, against one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(scenario: str, folder: Path, worker: str = "tests/distributed/worker.py", processes: int = 2) -> dict[str, Any]:
    out = folder / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
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


DECAYS = ("sgd", "adamw", "flambe", "inside", "penalty")  # in gradients, decoupled, in backward, in the loss
TRAINED = [f"{kind}-{decay}" for kind in ("ddp", "fsdp") for decay in DECAYS]
TENSORS = ["ddp-sgd-tensors", "fsdp-adamw-tensors", "fsdp-flambe-tensors"]
PIPELINES = ["pipeline-sgd", "pipeline-adamw"]
OTHERS = ["count", "checkpoint", "unwritable", "stages", "held", "late", "wrapped"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one start of two processes reports: starting them takes longer than what they do."""
    return run(",".join([*TRAINED, *TENSORS, *PIPELINES, *OTHERS]), tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("scenario", [*TRAINED, *TENSORS, *PIPELINES])
def test_two_processes_end_where_one_does(scenario: str, results: dict[str, Any]) -> None:
    assert results[scenario]["difference"] < 1e-12


def test_the_sharded_decay_moves_rank_by_rank_matrices_only(results: dict[str, Any]) -> None:
    assert 0 < results["count"]["bytes"] <= results["count"]["allowed"]


def test_products_left_to_distributed_tensors_would_move_more(results: dict[str, Any]) -> None:
    assert results["count"]["left to distributed tensors"] > results["count"]["allowed"]


def test_a_sharded_model_is_saved_whole(results: dict[str, Any]) -> None:
    assert results["checkpoint"]["difference"] == 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no folder", "FileExistsError: .*could not be saved: .*/file'"),
        ("full", "OSError: .*could not be saved: No space left on device .*bytes are needed.*/full'"),
        ("nan", "ValueError: head: weight holds NaN; nothing was written"),
    ],
)
def test_a_save_that_fails_raises_the_same_error_on_all_ranks(case: str, message: str, results: dict[str, Any]) -> None:
    first, second = results["unwritable"][case]
    assert re.match(message, first)
    assert first == second
    assert results["unwritable"]["left"] == []


def test_the_first_rank_of_each_stage_of_a_pipeline_writes_its_folder(results: dict[str, Any]) -> None:
    assert results["stages"]["same"] == [True, True]


def test_stages_of_a_pipeline_are_not_saved_to_one_folder(results: dict[str, Any]) -> None:
    for error in results["stages"]["one"]:
        assert re.match(
            r"ValueError: ranks save different models to one folder, got .*stage on rank \d: give every", error
        )


def test_saving_shards_holds_one_whole_tensor_at_a_time_on_every_rank(results: dict[str, Any]) -> None:
    assert results["held"]["most"] == [1, 1]
    assert results["held"]["gathered"] == [results["held"]["tensors"]] * 2


def test_factorizing_a_sharded_model_says_what_to_do_instead(results: dict[str, Any]) -> None:
    assert "before fully_shard" in str(results["late"]["error"])
    assert results["late"]["untouched"] == "True"


def test_factorizing_a_wrapped_model_says_to_wrap_it_afterwards(results: dict[str, Any]) -> None:
    assert "wrap it afterwards" in str(results["wrapped"]["error"])
