"""Attention under DDP and FSDP2 in two gloo processes, against one process."""

from __future__ import annotations

import pytest

from tests.distributed.test_many_processes import run

WORKER = "tests/distributed/attention_worker.py"
NAMES = {f"{model} {optimizer}" for model in ("torch", "llama", "gpt2") for optimizer in ("sgd", "adamw", "flambe")}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """What one start of two processes reports: starting them takes longer than what they do."""
    return run("attention", tmp_path_factory.mktemp("two"), WORKER)


def test_two_replicas_end_where_one_process_does(result: dict[str, dict[str, float]]) -> None:
    assert set(result["ddp"]) == NAMES
    assert {name: value for name, value in result["ddp"].items() if not value < 1e-8} == {}


def test_two_shards_end_where_one_process_does(result: dict[str, dict[str, float]]) -> None:
    assert set(result["fsdp"]) == NAMES
    assert {name: value for name, value in result["fsdp"].items() if not value < 1e-8} == {}


def test_the_decay_of_shards_gathers_only_weights_whose_rows_are_heads(result: dict[str, dict[str, float]]) -> None:
    sent = result["sharded gpt2"]
    assert 0 < sent["bytes"] <= sent["allowed"]
    assert sent["penalty"] < 1e-9
    assert sent["refused"] == 1  # shrinking what is sharded already


def test_shards_of_half_types_are_multiplied_in_float32(result: dict[str, dict[str, float]]) -> None:
    assert {name: value for name, value in result["halves"].items() if not value < 1e-2} == {}
    assert set(result["halves"]) == {"torch", "llama"}
