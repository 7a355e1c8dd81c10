"""Tensor parallelism, FSDP2 and both in four gloo processes, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.mesh_worker import RANK, WIDTH, build
from tests.distributed.test_many_processes import run
from tests.distributed.test_placements import ACTIONS

WORKER = "tests/distributed/mesh_worker.py"
IN_CI = ["both-sgd", "traffic", "decayed", "sequence"]
OPTIMIZED = [f"{kind}-{name}" for kind in ("tp", "fsdp", "both") for name in ("sgd", "adamw", "flambe")]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(",".join(IN_CI), tmp_path_factory.mktemp("square"), WORKER, processes=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def every(folder: Path) -> dict[str, Any]:
    scenarios = [*(name for name in OPTIMIZED if name not in IN_CI), "mixes", "heads", "save"]
    return run(",".join(scenarios), folder, WORKER, processes=4)


@pytest.fixture(scope="module")
def two(every: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What two processes report that read what the four have saved."""
    return run("load,llama", folder, WORKER)


def check_trained(found: dict[str, Any]) -> None:
    assert found["tied"]
    assert found["difference"] < 1e-9
    assert found["penalty"] < 1e-9
    assert found["diagnosis"] < 1e-9


def test_sharding_over_tensor_parallelism_trains_as_one_process_does(result: dict[str, Any]) -> None:
    check_trained(result["both-sgd"])


def test_a_product_sends_its_rank_where_a_dense_layer_sends_its_width(result: dict[str, Any]) -> None:
    way = ("forward", "backward")
    assert [result["traffic"][f"dense {each}"] for each in way] == [WIDTH, WIDTH]
    assert [result["traffic"][f"factorized {each}"] for each in way] == [RANK, RANK]


def test_the_decay_on_two_mesh_dimensions_sends_gram_matrices_only(result: dict[str, Any]) -> None:
    assert result["decayed"]["bytes"] == result["decayed"]["counted"]
    assert "(_StridedShard(dim=0, sf=2), Shard(dim=0))" in result["decayed"]["placements"]


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", [name for name in OPTIMIZED if name not in IN_CI])
def test_every_mesh_trains_as_one_process_does(scenario: str, every: dict[str, Any]) -> None:
    check_trained(every[scenario])


@pytest.mark.parametrize("kind", ["Linear", "Conv1D", "partial sums"])
def test_tokens_may_be_split_or_summed_up_outside_of_a_parallel_layer(kind: str, result: dict[str, Any]) -> None:
    assert result["sequence"][kind] < 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["pair", "groups", "deep", "attention"])
def test_every_mix_of_placements_on_two_dimensions_gives_the_result_of_one_process(
    model: str, every: dict[str, Any]
) -> None:
    found = {name: value for name, value in every["mixes"].items() if name.startswith(model)}
    assert len(found) == len(ACTIONS)
    assert {name: value for name, value in found.items() if not value < 1e-10} == {}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which no_dist=True says already
def test_a_distributed_checkpoint_is_read_by_every_mesh_and_by_one_process(
    every: dict[str, Any], two: dict[str, Any], folder: Path
) -> None:
    loaded, by_two = every["save"]["loaded"], two["load"]
    assert set(loaded) == set(by_two) == {"one", "tp", "fsdp", "both", "fz.load"}
    for found in (*loaded.values(), *by_two.values()):
        assert found["difference"] == 0
        assert found.get("one step later", 0) < 1e-12
    model = build()
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    model.load_state_dict(state["model"])
    expected = torch.load(folder / "state.pt")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


@pytest.mark.nightly
def test_a_split_llama_computes_and_generates_what_the_whole_one_does(two: dict[str, Any]) -> None:
    assert two["llama"]["split"] == 1
    assert two["llama"]["scores"] < 1e-12
    assert two["llama"]["gradients"] < 1e-12
    assert two["llama"]["words"] == 0


@pytest.mark.nightly
def test_attention_whose_heads_are_split_is_decayed_where_they_are(every: dict[str, Any]) -> None:
    found = every["heads"]
    assert found["size"] > 1e-4
    assert max(found["tp"], found["both"]) < 1e-12
    assert found["tp bytes"] == 0
