"""How a compressed network is trained further: its recipe, and where the training starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import factorized as fz
from factorized.experiments.compress.subject import recovery_recipe
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.recipe import Factorize
from factorized.experiments.text.network import build_text_network
from factorized.experiments.text.train import train_text
from factorized.experiments.training.network import Start, build_dense
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import load_trained
from tests.experiments.text.small import small
from tests.experiments.training.small import digits, recipe

FACTORIZE = Factorize(scheme="low_rank", ratio=0.3, allocate="spectrum")


@pytest.mark.parametrize(
    ("name", "length", "rate"), [("cifar10/resnet32x2", ("epochs", 20), 0.1), ("language/tiny", ("updates", 0.1), 0.5)]
)
def test_a_run_recovers_by_a_tenth_of_its_own_training_with_frobenius_decay(
    name: str, length: Any, rate: float
) -> None:
    own = load_any_recipe(name)
    made = recovery_recipe(own, None, FACTORIZE)
    unit, expected = length
    whole = getattr(own.schedule, unit)
    assert getattr(made.schedule, unit) == (expected if expected > 1 else round(expected * whole))
    assert made.shortened_from == whole
    assert (made.decay.kind, made.decay.strength) == ("frobenius", own.decay.strength)
    assert made.optimizer.lr == pytest.approx(rate * own.optimizer.lr)
    assert (made.factorize, made.name) == (FACTORIZE, f"{name}-recovery")


def test_a_recipe_that_is_given_keeps_its_length_its_rate_and_the_decay_of_its_products() -> None:
    given = load_any_recipe("digits/resnet8-lowrank-0.1", ["decay.kind=crs"])
    made = recovery_recipe(load_any_recipe("digits/resnet8"), given, FACTORIZE)
    assert (made.schedule, made.optimizer, made.decay) == (given.schedule, given.optimizer, given.decay)
    dense = recovery_recipe(None, load_any_recipe("digits/resnet8"), FACTORIZE)
    assert dense.decay.kind == "frobenius"
    with pytest.raises(ValueError, match="needs a recipe to recover by"):
        recovery_recipe(None, None, FACTORIZE)


def test_training_starts_from_the_given_network_and_its_ranks(tmp_path: Path) -> None:
    images, still = digits(), recipe("optimizer.lr=1e-12", "schedule.epochs=1")
    network = build_dense(still, images, seed=3)
    plan = fz.plan(network, rank=3)
    fz.factorize(network, plan)
    before = {name: tensor.clone() for name, tensor in network.named_parameters()}
    train(still, images, tmp_path, start=Start(network, plan))
    _, result, trained = load_trained(tmp_path / "seed-0")
    assert result["parameters"] == plan.params_after
    torch.testing.assert_close(dict(trained.named_parameters()), before)
    with pytest.raises(ValueError, match=r"start is one network, trained with one seed, got seeds \[0, 1\]"):
        train(still, images, tmp_path / "two", seeds=(0, 1), start=Start(network, plan))


def test_training_on_text_starts_from_the_given_network(tmp_path: Path) -> None:
    still, corpus = small("language", tmp_path, "optimizer.lr=1e-12", "schedule.updates=2")
    network = build_text_network(still, corpus.tokenizer, seed=3)
    fz.factorize(network, ratio=0.9)
    before = {name: tensor.clone() for name, tensor in network.named_parameters()}
    train_text(still, corpus, tmp_path / "run", start=network, device="cpu")
    torch.testing.assert_close(dict(network.named_parameters()), before)
    with pytest.raises(ValueError, match="start is one network, trained with one seed"):
        train_text(still, corpus, tmp_path / "two", seeds=(0, 1), start=network)
