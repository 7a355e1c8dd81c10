"""Networks of text that are split over processes (FSDP2)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.tensor import DTensor

from factorized._torch import leave_process_group
from factorized.experiments.text import masked
from factorized.experiments.text.network import build_text_network, build_text_optimizer
from factorized.experiments.text.sharding import shard, split_when_loaded, whole_state, whole_weights
from factorized.experiments.text.train import train_text
from factorized.experiments.text.trained import load_text_run
from tests.experiments.text.sharded_worker import CASES, LONGER, LOW_RANK, mask_every_third
from tests.experiments.text.small import small

ROOT = Path(__file__).parents[3]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        leave_process_group()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(16).reshape(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("one_process")
def test_weights_and_states_of_a_sharded_network_are_those_of_a_plain_one(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path, *LOW_RANK)
    plain, sharded, resumed = (build_text_network(recipe, corpus.tokenizer, 0) for _ in range(3))
    for model in (sharded, resumed):
        shard(model, torch.device("cpu"))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizers = [build_text_optimizer(recipe, model) for model in (plain, sharded, resumed)]
    _step(plain, optimizers[0])
    _step(sharded, optimizers[1])
    state = whole_state(optimizers[1])
    for index, held in optimizers[0].state_dict()["state"].items():
        for name, value in held.items():
            torch.testing.assert_close(state["state"][index][name], value)
    split_when_loaded(optimizers[2])
    optimizers[2].load_state_dict(state)
    held = optimizers[2].state_dict()["state"][0]
    assert isinstance(held["exp_avg"], DTensor)
    assert not isinstance(held["step"], DTensor)
    weights = whole_weights(sharded)
    expected = plain.state_dict()
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name])
    places = {name: value.untyped_storage().data_ptr() for name, value in weights.items()}
    assert len(set(places.values())) == len({v.untyped_storage().data_ptr() for v in expected.values()})  # ties


def _threads_of_groups() -> int:
    return sum(path.read_text().strip() == "pt_gloo_runloop" for path in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_the_threads_of_a_process_group_end_with_it(tmp_path: Path) -> None:
    # one that outlives it may abort the process as Python exits
    others = _threads_of_groups()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    recipe, corpus = small("language", tmp_path, *LOW_RANK)
    model = build_text_network(recipe, corpus.tokenizer, 0)
    shard(model, torch.device("cpu"))
    _step(model, build_text_optimizer(recipe, model))
    whole_weights(model)
    del model
    assert _threads_of_groups() > others
    leave_process_group()
    assert _threads_of_groups() == others


@pytest.mark.usefixtures("one_process")
def test_every_layer_of_encoder_and_decoder_is_a_group_and_the_rest_is_one(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FSDPModule

    recipe, corpus = small("translation", tmp_path, "model.layers=2")
    model = build_text_network(recipe, corpus.tokenizer, 0)
    shard(model, torch.device("cpu"))
    groups = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert groups == ["", *(f"model.{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2))]


def test_a_trainer_that_would_wrap_a_sharded_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorized.experiments.text.sharding.SHARDS", Version("99.1"))
    with pytest.raises(ValueError, match=r"run\.shard = true needs transformers 99\.1 or newer.*; pip install"):
        shard(torch.nn.Linear(2, 2), torch.device("cpu"))


def test_a_single_process_does_not_shard(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path, "run.shard=true")
    with pytest.raises(ValueError, match=r"run\.shard = true splits a network over several processes.*torchrun"):
        train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the same recipes by one process, in ``plain``, and by two that share a network, in ``sharded``."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "mask_tokens", mask_every_third)
        for name, changes in {**CASES, "whole": LONGER}.items():
            task = "language" if name == "whole" else name.partition("-")[0]
            recipe, corpus = small(task, folder / task, *changes)
            train_text(recipe, corpus, folder / "plain" / name, device="cpu")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launch, str(ROOT / "tests/experiments/text/sharded_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*CASES, "whole"])
def test_two_processes_that_share_a_network_end_where_one_does(folder: Path, name: str) -> None:
    (_, plain, one, _), (_, sharded, two, _) = (
        load_text_run(folder / kind / name / "seed-0") for kind in ("plain", "sharded")
    )
    assert sharded["machine"]["processes"] == 2
    for expected, found in zip(plain["history"], sharded["history"], strict=True):
        assert found == pytest.approx(expected, rel=2e-5)
    numbers = [{k: v for k, v in run["scores"].items() if k != "bleu_signature"} for run in (plain, sharded)]
    assert numbers[1] == pytest.approx(numbers[0], rel=2e-5)
    for key, value in one.state_dict().items():
        torch.testing.assert_close(
            two.state_dict()[key], value, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert sharded["parameters"] == plain["parameters"]
    assert plain["layers"]
    for row, expected in zip(sharded["layers"], plain["layers"], strict=True):
        for key, value in expected.items():
            assert row[key] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), (row, key)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["language-adamw", "masked-flambe"])  # factorized and dense: other functions save them
def test_a_sharded_run_leaves_the_files_of_one_that_is_not(folder: Path, name: str) -> None:
    plain, sharded = (folder / kind / name / "seed-0" for kind in ("plain", "sharded"))
    assert (sharded / "model" / "config.json").read_text() == (plain / "model" / "config.json").read_text()
    for place in ("", "model"):
        names = [sorted(re.split("[-.]", path.name)[0] for path in (run / place).iterdir()) for run in (plain, sharded)]
        assert names[0] == names[1]


@pytest.mark.nightly
def test_every_process_drops_other_entries(folder: Path) -> None:
    first, second = (json.loads((folder / f"dropped-{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == len(second) > 24
    assert len(set(first + second)) == len(first + second)


@pytest.mark.nightly
@pytest.mark.parametrize(("whole_run", "stopped_run"), [("whole", "stopped"), ("dropout", "dropout stopped")])
def test_a_sharded_run_stopped_by_a_signal_to_one_process_ends_as_one_that_was_not(
    folder: Path, whole_run: str, stopped_run: str
) -> None:
    whole, stopped = (folder / "sharded" / name / "seed-0" for name in (whole_run, stopped_run))
    results = [json.loads((run / "result.json").read_text()) for run in (whole, stopped)]
    assert results[0]["scores"] == results[1]["scores"]
    assert [row["update"] for row in results[0]["history"]] == [row["update"] for row in results[1]["history"]]
    states = [load_text_run(run)[2].state_dict() for run in (whole, stopped)]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
