"""Products whose factors are distributed in any mix of ways, in two gloo processes, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_many_processes import run

pytestmark = pytest.mark.nightly  # starting it takes one to two minutes; test_meshes.py is the check of every day
MODELS = ("pair", "groups", "deep", "train", "monarch", "attention")
ACTIONS = ("coupled", "decoupled", "in_the_loss", "cubed", "nuclear", "matched", "lamb", "flambe", "packed")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("placements", tmp_path_factory.mktemp("placements"), "tests/distributed/placements_worker.py")


def test_every_mix_of_shards_and_replicas_gives_the_result_of_one_process(result: dict[str, Any]) -> None:
    assert set(result["mixes"]) == {f"{model} {action}" for model in MODELS for action in ACTIONS}
    assert {name: value for name, value in result["mixes"].items() if not value < 1e-10} == {}


@pytest.mark.parametrize("action", ["coupled", "cubed", "lamb", "flambe"])
def test_a_gradient_held_as_partial_sums_counts_once(result: dict[str, Any], action: str) -> None:
    assert result["partial gradient"][action] < 1e-12


@pytest.mark.parametrize("entry", ["forms", "decay", "nuclear", "matcher", "flambe"])
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("whole", "0.U is not sharded, but 0.V, a factor of the same product, is; give all factors"),
        ("mesh", "0.V is distributed over other ranks than 0.U"),
        (
            "partial",
            "0.U has placements (Partial(sum), Replicate()); on every mesh dimension a factor of a product may be",
        ),
        ("strided", "0.U has placements (_StridedShard"),
    ],
)
def test_other_placements_are_refused_by_the_name_of_the_factor(
    result: dict[str, Any], case: str, message: str, entry: str
) -> None:
    assert message in result["refusals"][f"{case} {entry}"]


def test_lamb_refuses_parameters_that_are_partial_sums(result: dict[str, Any]) -> None:
    assert "redistribute it to Shard or Replicate" in result["refusals"]["partial lamb"]
