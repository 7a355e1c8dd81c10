"""Every benchmark at sizes that take a moment; a peer that is installed is measured, another is named."""

from __future__ import annotations

import importlib.util
import math
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import factorized as fz
from factorized.decay.forms import forms
from factorized.experiments.bench import decay, initialization, layers
from factorized.experiments.bench.billion import decoder, measure_billion
from factorized.experiments.bench.growth import measure_growth
from factorized.experiments.bench.initialization import compare_initializations
from factorized.experiments.bench.llama import LlamaSizes, build_llama, train_llama
from factorized.experiments.bench.networks import NETWORKS, run_networks, train_networks
from factorized.experiments.bench.session import Session
from factorized.experiments.bench.stack import Stack
from factorized.experiments.models.build import build_model
from factorized.experiments.recipes.find import recipe_names
from tests.on_gpu import needs_cuda

SMALL = {
    "ResNet-8": {"dense": "digits/resnet8", "low rank 0.1": "digits/resnet8-lowrank-0.1-fd"},
}
LLAMA = LlamaSizes(layers=1, width=64, feed_forward=96, vocabulary=32, rank=8, batch=1, length=8)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session("name", tmp_path / "name.json", torch.device("cpu"), seconds=1e-3, say=lambda line: None)


def without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package is not installed."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == missing else real(name, package)

    for module in (layers, initialization):
        monkeypatch.setattr(module, "find_spec", find_spec)
    monkeypatch.setitem(__import__("sys").modules, missing, None)


def ways(session: Session, group: str = "") -> list[str]:
    return [row["way"] for row in session.rows if group in row["group"]]


def test_the_networks_are_those_of_shipped_recipes_and_dense_is_first() -> None:
    assert {name for recipes in NETWORKS.values() for name in recipes.values()} <= set(recipe_names())
    assert all(next(iter(recipes)) == "dense" for recipes in NETWORKS.values())


def test_training_steps_and_inference_of_networks(session: Session) -> None:
    train_networks(session, SMALL, batch=2)
    run_networks(session, SMALL, batches=(1,))
    assert ways(session, "ResNet-8, training step, batch 2") == ["dense", "low rank 0.1"]
    assert ways(session, "ResNet-8, inference, batch 1") == ["dense", "low rank 0.1", "low rank 0.1, lowered"]
    assert all(row["ms"]["median"] > 0 and row["memory"] > 4 * row["parameters"] for row in session.rows)


def test_a_llama_is_trained_dense_and_at_a_rank_with_and_without_decay(session: Session) -> None:
    train_llama(session, LLAMA)
    assert ways(session) == ["dense", "feed-forward at rank 8", "feed-forward at rank 8, Frobenius decay"]
    dense, low, decayed = session.rows
    assert dense["parameters"] > low["parameters"] == decayed["parameters"]


@pytest.mark.parametrize("rank", [None, 8])
def test_the_compiled_llama_attends_without_masks(rank: int | None) -> None:
    masks: list[bool] = []

    def trace(graph: GraphModule, inputs: list[Any]) -> Any:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        masks.extend(node.kwargs.get("attn_mask") is not None for node in calls)
        return graph.forward

    torch._dynamo.reset()
    model = build_llama(LLAMA, rank, torch.device("cpu"))
    tokens = torch.zeros(LLAMA.batch, LLAMA.length, dtype=torch.long)
    torch.compile(model, backend=trace, dynamic=False)(input_ids=tokens, labels=tokens)
    assert masks == [False] * LLAMA.layers


def test_a_llama_without_transformers_is_skipped(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    without("transformers", monkeypatch)
    train_llama(session, LLAMA)
    assert session.rows == []
    assert "transformers, which is not installed: run pip install '.[text]'" in session.skipped[0]


def test_layers_are_compared_at_about_the_same_size(session: Session) -> None:
    layers.compare_layers(session, width=128, rows=4, channels=32, images=1)
    for group in ("linear 128×128, 4 rows, training", "convolution 32×32×3×3, 1 images of 16×16, inference"):
        rows = {row["way"]: row for row in session.rows if row["group"] == group}
        dense = rows.pop("dense")["parameters"]
        assert list(rows) == [
            *layers.OURS,
            "a plain pair of layers",
            "tensorly-torch, Tensor-Train",
            "tensorly-torch, Tucker",
        ]
        for row in rows.values():
            assert 0.06 < row["parameters"] / dense < 0.15
    assert session.skipped == []


@pytest.mark.parametrize("kind", ["blocktt", "tucker"])
def test_a_linear_of_tensorly_torch_gets_as_many_features(kind: str) -> None:
    assert layers.folded(1024) == (16, 8, 8)
    assert math.prod(layers.folded(4096)) == 4096
    assert layers.theirs(nn.Linear(64, 64), kind)(torch.ones(2, 64)).shape == (2, 64)


def test_layers_without_tensorly_torch_name_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    without("tltorch", monkeypatch)
    layers.compare_layers(session, width=64, rows=2, channels=16, images=1)
    assert session.skipped == ["tensorly-torch: not installed: pip install tensorly-torch"]
    assert "a plain pair of layers" in ways(session)
    assert not any("tensorly" in way for way in ways(session))


def small_network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return fz.factorize(build_model("resnet8", 10, 32, 3).to(device), ratio=0.3, init="kaiming")


def test_decays_are_compared_alone_and_in_a_step(session: Session) -> None:
    decay.compare_decays(session, small_network, LLAMA, batch=2)
    alone = [decay.OURS, decay.LOOP, decay.PENALTY]
    assert ways(session, "ResNet-32x2 at 0.1, alone") == alone
    assert ways(session, "Llama's feed-forward at rank 8, alone") == alone
    assert ways(session, "in the training step") == ["ordinary decay", *alone]


@pytest.mark.parametrize("way", [decay.by_hook, decay.by_loop, decay.by_penalty])
def test_all_decays_add_the_same_gradients(way: decay.Decay) -> None:
    model = small_network(torch.device("cpu")).double()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    way(model)()
    for form in forms(model):
        U, V = form.left.parameter, form.right.parameter
        torch.testing.assert_close(U.grad, decay.STRENGTH * U @ (V.mT @ V), rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(V.grad, decay.STRENGTH * V @ (U.mT @ U), rtol=1e-9, atol=1e-15)


def test_initializations_have_their_error_over_the_exact_one(session: Session) -> None:
    compare_initializations(session, sizes=(64,), shares=(8,))
    rows = {row["way"]: row for row in session.rows}
    assert list(rows) == [
        "exact SVD",
        "factorized",
        "torch.svd_lowrank",
        "torch.svd_lowrank, 8 iterations",
        "peft, PiSSA",
        "peft, PiSSA with 16 iterations",
    ]
    errors = {way: row["error_over_optimum"] for way, row in rows.items()}
    assert errors["exact SVD"] == 1
    assert errors["peft, PiSSA"] == pytest.approx(1, abs=1e-4)
    assert all(1 - 1e-4 < error < 1.2 for error in errors.values())
    assert all((row["width"], row["rank"]) == (64, 8) for row in rows.values())


def test_initializations_without_peft_name_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    without("peft", monkeypatch)
    compare_initializations(session, sizes=(32,), shares=(4,))
    assert session.skipped == ["PiSSA: peft is not installed: pip install peft"]
    assert not any("PiSSA" in way for way in ways(session))


def test_growth_is_fitted_along_every_dimension(session: Session) -> None:
    measure_growth(session, Stack(width=128, rank=8, depth=4, rows=2), processes=())
    assert [(fit["grows"], fit["way"]) for fit in session.fits] == [
        ("width", "dense"),
        ("width", "low rank"),
        ("rank", "low rank"),
        ("depth", "dense"),
        ("depth", "low rank"),
    ]
    fits = {(fit["grows"], fit["way"]): fit for fit in session.fits}
    assert fits["width", "dense"]["sizes"] == [32, 64, 128, 256]
    assert 1.7 < fits["width", "dense"]["memory"] < 2.1
    assert 0.8 < fits["width", "low rank"]["memory"] < 1.2


@pytest.mark.nightly
def test_processes_share_the_parameters(session: Session) -> None:
    session.only = "growth with processes"
    measure_growth(session, Stack(width=64, rank=8, depth=2, rows=2), processes=(1, 2))
    assert [row["size"] for row in session.rows] == [1, 2]
    (fit,) = session.fits
    assert (fit["grows"], fit["memory"]) == ("processes", pytest.approx(-1, abs=0.05))


def test_a_large_model_goes_through_every_stage(session: Session) -> None:
    measure_billion(session, width=64, feed_forward=96, layers=2)
    assert ways(session) == ["plan, without weights", "plan", "factorize", "save", "load", "compose"]
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in decoder(4096, 11008, 5).parameters()) > 1e9


def test_a_model_that_does_not_fit_is_skipped(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorized.experiments.bench.billion._memory_of_machine", lambda: 2**30)
    measure_billion(session)
    assert session.rows == []
    assert session.skipped == ["1,011,875,840 parameters: needs 11 GiB of memory, and this machine has 1"]


@needs_cuda
def test_networks_and_decays_are_measured_on_a_gpu(tmp_path: Path) -> None:
    session = Session("name", tmp_path / "name.json", torch.device("cuda"), seconds=0.1, say=lambda line: None)
    train_networks(session, SMALL, batch=8)
    run_networks(session, SMALL, batches=(8,))
    decay.compare_decays(session, small_network, LLAMA, batch=8)
    assert len(session.rows) == 2 + 2 + 3 + 3 + 4
    assert all(row["ms"]["median"] > 0 and row["memory"] > 0 for row in session.rows)
