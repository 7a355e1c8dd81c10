"""How a compressed network is trained further: its recipe, and where the training starts."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

import factorized as fz
from factorized.experiments.cli.main import main
from factorized.experiments.compress.images import ImageSubject
from factorized.experiments.compress.subject import recovery_recipe
from factorized.experiments.compress.text import TextSubject
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.recipe import Factorize, Recipe
from factorized.experiments.text.network import build_text_network
from factorized.experiments.text.train import train_text
from factorized.experiments.training.network import Start, build_dense
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import load_trained
from tests.experiments.text.small import small
from tests.experiments.training.small import digits, recipe

CPU = torch.device("cpu")
FACTORIZE = Factorize(scheme="low_rank", ratio=0.3, allocate="spectrum")


@pytest.mark.parametrize(
    ("name", "unit", "length"),
    [("cifar10/resnet32x2", "epochs", 20), ("cifar10/resnet110", "epochs", 20), ("language/small", "updates", 300)],
)
def test_a_run_recovers_by_a_tenth_of_its_own_training_with_frobenius_decay(name: str, unit: str, length: int) -> None:
    own = load_any_recipe(name)
    made = recovery_recipe(own, None, FACTORIZE)
    assert getattr(made.schedule, unit) == length
    assert made.shortened_from == getattr(own.schedule, unit)
    assert (made.decay.kind, made.decay.strength) == ("frobenius", own.decay.strength)
    assert made.optimizer == own.optimizer.model_copy(update={"lr": made.optimizer.lr})
    assert (made.factorize, made.name) == (FACTORIZE, f"{name}-recovery")
    assert made.paper is None  # whose figures are of other training


@pytest.mark.parametrize("name", ["digits/resnet8", "cifar10/resnet110", "language/tiny", "language/small"])
def test_the_learning_rate_rises_to_a_fifth_of_what_it_was_and_falls_to_zero(name: str) -> None:
    own: Any = load_any_recipe(name)
    made: Any = recovery_recipe(own, None, FACTORIZE)
    if isinstance(made, Recipe):
        rates = [made.schedule.learning_rate(made.optimizer.lr, made.schedule.epochs * n / 1000) for n in range(1001)]
    else:
        rates = [made.optimizer.lr * made.schedule.factor(n) for n in range(made.schedule.updates + 1)]
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(0.2 * own.optimizer.lr, rel=0.01)
    assert peak == pytest.approx(0.1 * len(rates), abs=2)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[0] < 0.2 * max(rates)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


@pytest.mark.nightly
def test_recovery_costs_no_accuracy_where_nothing_was_lost_and_wins_it_back_where_much_was(tmp_path: Path) -> None:
    """Means over three networks for the digits with 99 %: another CPU rounds otherwise, and one network gains or loses
    two of the 355 images by that.
    """
    assert main(["train", "digits/resnet8", "--seeds", "3", "--out", str(tmp_path), "--quiet"]) == 0
    scores: dict[tuple[str, str], list[float]] = {}
    for run in (tmp_path / f"digits/resnet8/seed-{seed}" for seed in range(3)):
        for ratio in ("0.5", "0.3", "0.1"):
            assert main(["compress", str(run), "--ratio", ratio, "--quiet"]) == 0
            state = json.loads((run / f"compressed-{ratio}/compress.json").read_text())
            for stage in ("before", "compressed", "recovered"):
                scores.setdefault((ratio, stage), []).append(state[stage]["scores"]["accuracy"])
    for ratio in ("0.5", "0.3"):
        assert mean(scores[ratio, "recovered"]) > mean(scores[ratio, "before"]) - 0.5
    assert mean(scores["0.1", "recovered"]) > mean(scores["0.1", "compressed"]) + 20


def test_a_recipe_that_is_given_keeps_its_length_its_rate_and_the_decay_of_its_products() -> None:
    given = load_any_recipe("digits/resnet8-lowrank-0.1", ["decay.kind=crs"])
    made = recovery_recipe(load_any_recipe("digits/resnet8"), given, FACTORIZE)
    assert (made.schedule, made.optimizer, made.decay) == (given.schedule, given.optimizer, given.decay)
    dense = recovery_recipe(None, load_any_recipe("digits/resnet8"), FACTORIZE)
    assert dense.decay.kind == "frobenius"
    with pytest.raises(ValueError, match="needs a recipe to recover by"):
        recovery_recipe(None, None, FACTORIZE)


def test_lamb_becomes_flambe_whose_decay_is_apart_from_the_gradient_too() -> None:
    own: Any = load_any_recipe("bert/tiny")
    assert (own.optimizer.name, own.decay.kind) == ("lamb", "weight")
    for made in (recovery_recipe(own, None, FACTORIZE), recovery_recipe(None, own, FACTORIZE)):
        assert made.optimizer.name == "flambe"
        assert (made.decay.kind, made.decay.strength) == ("frobenius", own.decay.strength)
    given = load_any_recipe("bert/tiny-lamb-fd")  # says itself that LAMB decays products
    assert recovery_recipe(own, given, FACTORIZE).optimizer == given.optimizer


def test_a_recipe_is_fitted_to_the_model_and_the_data_of_the_run_it_recovers(tmp_path: Path) -> None:
    own = recipe("data.name=cifar10", name="cifar10/resnet32x2")  # on images that --data put in their place
    images = ImageSubject("own", [], CPU, torch.nn.Identity, own, model="resnet32x2", images=digits())
    fitted: Any = images.fit(recipe())
    assert (fitted.model.name, fitted.data.name) == ("resnet32x2", "cifar10")
    fitted = ImageSubject("own", [], CPU, torch.nn.Identity, model="own:model", images=digits()).fit(recipe())
    assert (fitted.model.name, fitted.data.name) == ("own:model", "digits")
    reads, corpus = small("masked", tmp_path)
    reads = reads.model_copy(update={"model": reads.model.model_copy(update={"from_run": "bert/tiny"})})
    text: Any = TextSubject("own", [], CPU, torch.nn.Identity, reads, reads=reads, corpus=corpus).fit(reads)
    assert text.model.from_run is None  # it starts from the compressed network
    assert (text.data, text.model.hidden) == (reads.data, reads.model.hidden)


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
