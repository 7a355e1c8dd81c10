"""Every recipe of the paper aims at the paper's figure and trains as its appendix C says.

Tables 1, 2 and 3 of the paper, with the deviations of its appendix (where table 2 is as errors in percent).
"""

from __future__ import annotations

import pytest

from factorized.vision.recipe import Recipe
from factorized.vision.recipes import load_recipe, recipe_names

LOW_RANK = ("", "-si", "-fd", "-si-fd")  # a row for each, a column for each ratio
TABLE_1 = {
    ("cifar10/vgg19", "0.1 0.05 0.02"): """93.75±0.48
        90.71±0.42 88.08±0.14 80.81±0.85
        90.99±0.34 88.61±0.95 82.53±0.14
        91.57±0.26 88.16±0.50 82.81±0.37
        91.58±0.27 88.98±0.18 83.27±0.56""",
    ("cifar100/vgg19", "0.1 0.05 0.02"): """73.42±0.17
        62.32±0.26 54.97±5.28 42.80±3.14
        63.77±0.93 58.51±1.90 45.02±3.24
        64.07±1.58 59.34±2.97 45.73±2.62
        65.61±1.48 60.10±1.29 46.43±1.26""",
    ("tiny-imagenet/vgg19", "0.1 0.05 0.02"): """62.19±0.74
        48.50±3.43 46.98±1.68 36.57±1.03
        49.87±1.39 46.73±2.83 37.25±0.19
        53.93±0.66 47.95±1.13 35.63±0.71
        53.53±0.45 47.60±0.51 35.68±0.64""",
    ("cifar10/resnet32x2", "0.1 0.05 0.02"): """94.49±0.29
        93.59±0.12 92.45±0.69 87.95±0.91
        92.52±0.66 91.72±0.63 87.36±0.65
        92.92±0.29 89.44±0.25 83.05±1.02
        94.34±0.34 92.90±0.43 87.97±0.86""",
    ("cifar100/resnet32x2", "0.1 0.05 0.02"): """75.41±1.26
        72.71±0.43 67.86±0.91 61.08±0.76
        71.71±1.46 67.41±1.12 60.79±0.26
        71.85±0.39 66.89±0.73 55.31±0.61
        74.41±0.67 70.22±0.64 61.40±0.96""",
    ("tiny-imagenet/resnet32x2", "0.15 0.1 0.05"): """63.02±0.94
        60.82±0.72 58.72±0.53 55.39±1.02
        59.53±1.41 57.60±0.88 55.00±0.90
        59.45±0.82 57.24±0.61 54.15±1.22
        62.24±0.39 60.25±1.02 55.97±0.48""",
}
# columns wd, crs, fd; a second row with SI
TABLE_2 = {
    "lowrank-0.01667": "7.62±0.08 8.63±0.87 7.23±0.32  7.72±0.11 8.83±0.17 7.26±0.45",
    "tt-0.01667": "8.55±4.22 7.01±0.35 7.26±0.73  7.72±0.46 6.52±0.17 6.22±0.50",
    "tucker-0.01667": "10.67±7.68 8.28±0.05 8.65±0.27  9.91±6.71 6.79±0.34 7.07±0.28",
    "lowrank-0.06667": "5.31±0.06 5.86±0.22 3.89±0.17  5.49±0.42 5.53±0.72 3.86±0.22",
    "tt-0.06667": "7.33±0.27 5.20±0.37 5.02±0.15  6.49±0.30 4.79±0.15 5.10±0.35",
    "tucker-0.06667": "5.64±0.19 5.30±0.35 5.30±0.12  5.61±0.46 5.15±0.23 5.24±0.21",
}
# columns unfactorized, full, deep, wide with WD; full, deep, wide with FD
TABLE_3 = {
    "cifar10/resnet32": "92.66±0.34 92.11±0.36 91.37±0.09 92.26±0.35 93.32±0.07 93.11±0.13 93.36±0.11",
    "cifar10/resnet56": "93.15±0.56 92.95±0.24 92.52±0.13 93.08±0.23 94.13±0.16 93.89±0.13 93.83±0.10",
    "cifar10/resnet110": "93.61±0.28 93.73±0.16 93.25±0.07 93.53±0.07 94.28±0.05 94.42±0.09 94.13±0.05",
    "cifar100/resnet32": "68.17±0.48 68.84±0.27 67.84±0.50 69.23±0.32 70.32±0.41 70.25±0.46 70.53±0.07",
    "cifar100/resnet56": "70.25±0.30 70.60±0.53 69.62±0.35 70.69±0.21 72.79±0.37 72.28±0.26 73.01±0.39",
    "cifar100/resnet110": "72.11±0.37 72.33±0.57 71.28±0.62 71.70±0.55 73.98±0.22 74.17±0.23 73.69±0.72",
}


def figures(text: str) -> list[tuple[float, float]]:
    return [(float(mean), float(spread)) for mean, _, spread in (word.partition("±") for word in text.split())]


def in_the_tables() -> dict[str, tuple[int, float, float]]:
    """Return table, accuracy and deviation of every recipe that the tables have."""
    found: dict[str, tuple[int, float, float]] = {}
    for (model, columns), text in TABLE_1.items():
        dense, *cells = figures(text)
        names = [f"{model}-lowrank-{ratio}{way}" for way in LOW_RANK for ratio in columns.split()]
        found |= {model: (1, *dense), **{name: (1, *cell) for name, cell in zip(names, cells, strict=True)}}
    found["cifar10/wrn28-10"] = (2, 100 - 3.21, 0.22)
    for scheme, text in TABLE_2.items():
        names = [f"cifar10/wrn28-10-{scheme}-{decay}{si}" for si in ("", "-si") for decay in ("wd", "crs", "fd")]
        found |= {name: (2, 100 - e, spread) for name, (e, spread) in zip(names, figures(text), strict=True)}
    for model, text in TABLE_3.items():
        ways = ["", *(f"-{way}-{decay}" for decay in ("wd", "fd") for way in ("full", "deep", "wide"))]
        found |= {f"{model}{way}": (3, *cell) for way, cell in zip(ways, figures(text), strict=True)}
    return found


PAPER = in_the_tables()
OURS = {name: load_recipe(name) for name in recipe_names()}


def test_every_cell_of_the_tables_has_a_recipe_with_its_figure() -> None:
    assert len(PAPER) == 78 + 37 + 42
    for name, (table, accuracy, deviation) in PAPER.items():
        paper = OURS[name].paper
        assert paper is not None
        assert (paper.table, paper.deviation) == (table, pytest.approx(deviation)), name
        assert paper.accuracy == pytest.approx(accuracy, abs=1e-9), name


def test_no_other_recipe_claims_a_figure_of_a_table() -> None:
    assert {name for name, recipe in OURS.items() if recipe.paper and recipe.paper.table} == set(PAPER)


def learning_rates(recipe: Recipe) -> list[tuple[int, float]]:
    """Return the epochs at which the learning rate changes, and what it is from there."""
    rates = [recipe.schedule.learning_rate(recipe.optimizer.lr, epoch) for epoch in range(recipe.schedule.epochs)]
    return [(epoch, round(rate, 9)) for epoch, rate in enumerate(rates) if epoch == 0 or rate != rates[epoch - 1]]


def expected_rates(model: str) -> list[tuple[int, float]]:
    if model == "wrn28-10":
        return [(0, 0.1), (60, 0.02), (120, 0.004), (160, 0.0008)]
    late = [(100, 0.01), (150, 0.001)]
    return [(0, 0.01), (1, 0.1), *late] if model in ("resnet56", "resnet110") else [(0, 0.1), *late]


DECAY = {"vgg19": 2e-4, "wrn28-10": 5e-4}


@pytest.mark.parametrize("name", [name for name in OURS if not name.startswith("digits/")])
def test_a_recipe_of_the_paper_trains_as_the_paper_does(name: str) -> None:
    recipe = OURS[name]
    model = recipe.model.name
    assert recipe.schedule.epochs == 200
    assert learning_rates(recipe) == expected_rates(model)
    assert (recipe.run.batch, recipe.optimizer.momentum, recipe.optimizer.nesterov) == (128, 0.9, False)
    assert (recipe.optimizer.clip, recipe.run.label_smoothing) == (None, 0)
    assert (recipe.data.crop_padding, recipe.data.flip) == (4, True)
    assert recipe.decay.strength == DECAY.get(model, 1e-4)


@pytest.mark.parametrize("name", [name for name in OURS if "-" in name.split("/")[1].removeprefix("wrn28-10")])
def test_a_recipe_does_what_its_name_says(name: str) -> None:
    recipe, words = OURS[name], name.split("/")[1].removeprefix("wrn28-10").split("-")[1:]
    fields = recipe.factorize
    schemes = {"lowrank": "low_rank", "tt": "tensor_train", "tucker": "tucker"}
    assert fields.scheme == schemes.get(words[0], "overcomplete")
    if fields.scheme == "overcomplete":
        assert fields.variant == words[0]
    ratios = [float(word) for word in words if word[0].isdigit()]
    if ratios and fields.scheme == "low_rank":
        assert fields.ratio == ratios[0]
    kinds = {"fd": "frobenius", "crs": "crs", "none": "none", "normalized": "normalized"}
    assert recipe.decay.kind == next((kinds[word] for word in words if word in kinds), "weight")
    if "none" in words or "normalized" in words:
        return  # curves beside the one with SI and FD, and drawn as it is
    drawn = "default" if fields.separable else "normal" if recipe.model.name == "vgg19" else "kaiming"
    assert fields.init == ("spectral" if "si" in words else drawn)
