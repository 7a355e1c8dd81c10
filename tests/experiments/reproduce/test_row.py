"""A row of ``factorized reproduce``: our runs beside the figure that their recipe aims at."""

from __future__ import annotations

from pathlib import Path

import pytest

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.shorten import shorten
from factorized.experiments.reproduce.planned import PlannedRun
from factorized.experiments.reproduce.row import Row
from tests.experiments.reproduce.made import image_result, run_of


def row_of(name: str, *accuracies: float, epochs: int | None = None) -> Row:
    recipe = load_any_recipe(name)
    recipe = recipe if epochs is None else shorten(recipe, epochs)
    finished = [run_of(image_result(name, seed, accuracy)) for seed, accuracy in enumerate(accuracies)]
    runs = [PlannedRun(recipe, run.seed, Path(name), "", run) for run in finished]
    return Row([*runs, PlannedRun(recipe, len(runs), Path(name), "")])


def test_a_row_says_how_many_deviations_of_the_paper_our_mean_is_off() -> None:
    row = row_of("cifar10/resnet32", 93.0, 93.34)
    assert (str(row.paper), row.ours and row.ours.n) == ("92.66 ± 0.34", 2)
    assert row.off == pytest.approx((93.17 - 92.66) / 0.34)


@pytest.mark.parametrize(
    "row",
    [row_of("cifar10/resnet32"), row_of("cifar10/resnet32", 93.0, epochs=3), row_of("digits/resnet8", 93.0)],
    ids=["without runs", "shortened", "without a figure of the paper"],
)
def test_a_row_that_cannot_be_compared_is_off_by_nothing(row: Row) -> None:
    assert row.off is None


def test_a_figure_that_the_paper_prints_as_an_error_is_compared_as_the_accuracy_that_its_recipe_aims_at() -> None:
    row = row_of("cifar10/wrn28-10", 96.57)
    assert row.paper is not None
    assert row.paper.mean == pytest.approx(96.79)
    assert row.off == pytest.approx(-1.0)
