"""Shortened recipes: the schedule keeps its shape, and the recipe says that it is shortened."""

from __future__ import annotations

import pytest

from factorized.experiments.recipes.find import check_recipe, check_text_recipe, load_any_recipe, load_recipe
from factorized.experiments.recipes.shorten import length_of, shorten, shortening, unit_of


@pytest.mark.parametrize("name", ["cifar10/resnet32x2", "cifar10/resnet32", "cifar10/wrn28-10"])
def test_the_learning_rate_falls_at_the_same_shares_of_a_shortened_run(name: str) -> None:
    whole, short = load_recipe(name), shorten(load_recipe(name), 20)
    rates = [whole.schedule.learning_rate(0.1, 10 * epoch) for epoch in range(20)]
    assert [short.schedule.learning_rate(0.1, epoch) for epoch in range(20)] == pytest.approx(rates)


def test_a_shortened_recipe_says_so_and_reads_back_from_its_own_data() -> None:
    short = shorten(load_recipe("cifar10/resnet110"), 3)
    assert (short.schedule.epochs, short.schedule.warmup_epochs, short.shortened_from) == (3, 1, 200)
    assert shortening(short.to_dict()) == "3 of 200 epochs"
    assert check_recipe(short.to_dict(), "short") == short
    assert shorten(load_recipe("cifar10/resnet110"), 1).schedule.warmup_epochs == 0


def test_updates_of_text_are_shortened_with_their_warm_up_and_checkpoints() -> None:
    whole = load_any_recipe("translation/iwslt14")
    short = shorten(whole, 50)
    assert (unit_of(short), length_of(short)) == ("updates", 50)
    assert short.schedule.warmup_updates == 2  # 4,000 of 100,000
    assert (short.run.evaluate_every, short.run.checkpoint_every) == (50, 50)
    assert shortening(short.to_dict()) == "50 of 100,000 updates"
    assert check_text_recipe(short.to_dict(), "short") == short


@pytest.mark.parametrize("length", [200, 300])
def test_a_recipe_that_is_no_longer_than_asked_stays_as_it_is(length: int) -> None:
    whole = load_recipe("cifar10/resnet32")
    assert shorten(whole, length) == whole
    assert shortening(whole.to_dict()) == ""
