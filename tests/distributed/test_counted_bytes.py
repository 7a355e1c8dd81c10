"""The bytes of ``benchmarks.counting``, against what two and four gloo processes send in a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.counting import (
    Counted,
    Decay,
    Traffic,
    decay_over_parts,
    decay_over_shards,
    lamb_norms,
    read,
    replicated,
    sharded,
    tensor_parallel,
    tokens_split,
)
from tests.distributed.scale_worker import BATCH, LENGTH, TP, build
from tests.distributed.test_many_processes import run

WORKER = "tests/distributed/scale_worker.py"
ONE_WAY = ["ddp-dense", "ddp-low", "ddp-flambe", "fsdp-dense", "fsdp-low", "fsdp-lamb", "fsdp-flambe"]
ONE_WAY += ["tp-dense", "tp-dense_sums", "tp-low", "tp-flambe", "tp-dense_split"]
ONE_WAY += ["tp-dense_sums_split", "tp-low_split"]
SCENARIOS = {2: ONE_WAY, 4: [*ONE_WAY, "both-dense", "both-low", "both-flambe"]}
DECAYS: dict[str, Decay] = {"low": "products", "low_split": "products", "flambe": "ov"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return {
        processes: run(",".join(names), tmp_path_factory.mktemp("scale"), WORKER, processes)
        for processes, names in SCENARIOS.items()
    }


def counted(scenario: str, processes: int) -> tuple[Traffic, float]:
    """Return what the collectives of a step are given, and the bytes that gloo sends for it."""
    way, variant = scenario.split("-")
    with torch.device("meta"):
        model: Counted = read(build(variant))
    tp = {"tp": processes, "both": TP}.get(way, 1)
    shards = 1 if way == "ddp" else processes // tp
    decay: Decay = DECAYS.get(variant, "none")
    data = replicated(model) if way == "ddp" else sharded(model, shards, tp)
    data += decay_over_shards(model, decay, shards, tp)
    data += lamb_norms(model, shards) if variant in ("lamb", "flambe") else Traffic()
    send = tokens_split if variant.endswith("_split") else tensor_parallel
    within = send(model, tp, BATCH * LENGTH, "sums" in variant) + decay_over_parts(model, decay, tp)
    sent = sum(
        each.sent(ranks) + Traffic(scattered=each.scattered).sent(ranks)  # gloo scatters by summing everywhere
        for each, ranks in ((data, processes // tp), (within, tp))
    )
    return data + within, sent


@pytest.mark.nightly
@pytest.mark.parametrize(("processes", "scenario"), [(n, name) for n, names in SCENARIOS.items() for name in names])
def test_a_training_step_sends_the_bytes_that_are_counted(
    processes: int, scenario: str, results: dict[int, dict[str, Any]]
) -> None:
    found = results[processes][scenario]
    given, sent = counted(scenario, processes)
    for kind in ("gathered", "scattered", "summed"):
        assert found[kind] == pytest.approx(getattr(given, kind), rel=0.05), kind
    assert found["written"] == pytest.approx(sent, rel=0.05)
