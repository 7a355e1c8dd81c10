"""Attention under DDP and FSDP2 in two gloo processes, against one process."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.test_many_processes import run

WORKER = "tests/distributed/attention_worker.py"


NAMES = {f"{model} {optimizer}" for model in ("torch", "llama", "gpt2") for optimizer in ("sgd", "adamw", "flambe")}


def test_two_replicas_end_where_one_process_does(tmp_path: Path) -> None:
    differences = run("ddp", tmp_path, WORKER)
    assert set(differences) == NAMES
    assert {name: value for name, value in differences.items() if not value < 1e-8} == {}


def test_two_shards_end_where_one_process_does_and_gather_only_weights_whose_rows_are_heads(tmp_path: Path) -> None:
    result = run("fsdp", tmp_path, WORKER)
    assert {name: result[name] for name in NAMES if not result[name] < 1e-8} == {}
    assert 0 < result["bytes"] <= result["allowed"]
    assert result["penalty"] < 1e-9
    assert result["refused"] == 1  # shrinking what is sharded already
