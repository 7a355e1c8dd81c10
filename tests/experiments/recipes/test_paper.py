"""Every recipe of the paper aims at the paper's figure and trains as its appendix C says.

The tables' files hold all figures of the paper's tables, those of others that it quotes included.
"""

from __future__ import annotations

from collections import Counter

import pytest

from factorized.experiments.recipes.find import (
    load_any_recipe,
    paper_cells,
    recipe_names,
)
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.recipes.text import TextRecipe

OURS = {name: recipe for name in recipe_names() if isinstance(recipe := load_any_recipe(name), Recipe)}
CELLS = paper_cells()


def test_every_figure_of_the_papers_tables_is_there() -> None:
    counted = Counter((cell.table, cell.metric, cell.source is not None) for cell in CELLS if cell.figure is not None)
    assert counted == {
        (1, "accuracy", False): 2 * 3 * (1 + 4 * 3),  # models, data sets; dense, four ways at three ratios
        (1, "accuracy", True): 2 * 3 * 4 * 3,
        (2, "error", False): 1
        + 2 * 3 * 6,  # dense; ratios, decompositions (Tucker's of table 7), decays with and without SI
        (3, "accuracy", False): 2 * 3 * 7,  # data sets, depths, columns; deviations of table 8
        (3, "accuracy", True): 4,
        (3, "training parameters (M)", False): 2 * 3 * 7,
        (3, "testing parameters (M)", False): 2 * 3 * 7,
        (3, "testing parameters (M)", True): 2 * 3,
        (4, "F1", False): 7,
        (4, "", False): 7 * 2,
        (5, "accuracy", True): 3 * (2 + 10 * 3) + 2 * 2 * 3,  # two baselines, ten methods; two more on CIFAR
        (6, "accuracy", True): 3 * (2 + 10 * 3) + 2 * 2 * 3 - 1,  # one is N/A
        (8, "training time (hours)", False): 2 * 3 * 7,
        (9, "", False): 6 * 3,
        (9, "", True): 16 * 3,
    }


@pytest.mark.parametrize(
    ("table", "metric", "grid", "row", "column", "figure", "deviation", "source"),
    [
        (1, "accuracy", "ResNet-32x2 on CIFAR-10", "Low-Rank (SI & FD)", "0.1", 94.34, 0.34, None),
        (1, "accuracy", "VGG-19 NFC on CIFAR-100", "Low-Rank (SI & FD)", "0.05", 60.1, 1.29, None),
        (1, "accuracy", "ResNet-32x2 on Tiny-ImageNet", "Low-Rank (FD)", "0.05", 54.15, 1.22, None),
        (1, "accuracy", "VGG-19 NFC on Tiny-ImageNet", "Dynamic Sparsity", "0.02", 58.36, None, "wang:20a"),
        (2, "error", "WideResNet-28-10 on CIFAR-10", "Tensor-Train 0.01667", "FD & SI", 6.22, 0.5, None),
        (2, "error", "WideResNet-28-10 on CIFAR-10", "Tucker 0.01667", "WD", 10.67, 7.68, None),
        (3, "accuracy", "CIFAR-100", "110", "deep FD", 74.17, 0.23, None),
        (3, "accuracy", "CIFAR-100", "56", "DO-Conv", 70.78, None, "cao:20"),
        (3, "training parameters (M)", "CIFAR-10", "110", "wide FD", 10.39, None, None),
        (4, "F1", "BERT large", "FLAMBé (SI & FD), 0.5", "F1", 90.55, None, None),
        (4, "", "BERT base", "LAMB, 0.5", "EM", 79.83, None, None),
        (5, "accuracy", "VGG-19 NFC on CIFAR-10", "LR Rewinding (renda:20)", "0.02", 10.0, 0.0, "su:20"),
        (6, "accuracy", "ResNet-32x2 on CIFAR-100", "baseline", "uncompressed", 74.57, None, "su:20"),
        (8, "training time (hours)", "CIFAR-10", "56", "full FD", 2.22, 0.07, None),
        (9, "", "ResNet-32 on CIFAR-100", "SD, self", "change", 2.79, None, "xu:19"),
    ],
)
def test_a_figure_stands_where_the_paper_has_it(
    table: int,
    metric: str,
    grid: str,
    row: str,
    column: str,
    figure: float,
    deviation: float | None,
    source: str | None,
) -> None:
    place = (table, metric, grid, row, column, source)
    (cell,) = [c for c in CELLS if (c.table, c.metric, c.grid, c.row, c.column, c.source) == place]
    assert (cell.figure, cell.deviation) == (figure, deviation)


BEST_OF = {
    "Pruning": ("OBD", "MLPrune"),
    "Lottery (w. hybrid/rewind)": ("LT", "LR Rewinding", "Hybrid Tickets"),
    "Dynamic Sparsity": ("DSR", "SET", "Deep-R"),
    "Fixed Sparsity": ("SNIP", "GraSP", "Random Tickets"),
}


def test_what_table_1_quotes_is_the_best_of_tables_5_and_6() -> None:
    for cell in CELLS:
        if cell.table == 1 and cell.source is not None:
            place, methods = (cell.grid, cell.column), BEST_OF[cell.row]
            single = [c for c in CELLS if c.table in (5, 6) and (c.grid, c.column) == place]
            assert cell.figure == max(c.figure or 0 for c in single if c.row.startswith(methods)), cell


def test_table_9_repeats_table_3_and_its_changes_are_differences() -> None:
    third = {
        (f"ResNet-{c.row} on {c.grid}", c.column): c.figure for c in CELLS if (c.table, c.metric) == (3, "accuracy")
    }
    ninth = {(c.grid, c.row, c.source): {} for c in CELLS if c.table == 9}
    for cell in CELLS:
        if cell.table == 9:
            ninth[cell.grid, cell.row, cell.source][cell.column] = cell.figure
    for (grid, row, source), told in ninth.items():
        assert told["change"] == pytest.approx(told["distilled"] - told["baseline"]), (grid, row)
        if source is None:
            assert told["baseline"] == third[grid, "unfactorized"]
            assert told["distilled"] == third[grid, f"{row.split()[0]} FD"]


def test_every_cell_of_the_papers_own_has_a_recipe_with_its_figure() -> None:
    own = [c for c in CELLS if c.metric in ("accuracy", "error") and c.source is None and c.figure is not None]
    assert len(own) == 78 + 37 + 42
    for cell in own:
        paper = OURS[cell.recipe or ""].paper
        assert paper is not None
        assert cell.figure is not None
        accuracy = 100 - cell.figure if cell.metric == "error" else cell.figure
        assert (paper.table, paper.deviation) == (cell.table, cell.deviation)
        assert paper.accuracy == pytest.approx(accuracy, abs=1e-9)


def test_no_other_recipe_claims_a_figure_of_a_table() -> None:
    every = {name: load_any_recipe(name) for name in recipe_names()}
    claimed = {name for name, recipe in every.items() if recipe.paper and recipe.paper.table}
    assert claimed == {cell.recipe for cell in CELLS if cell.recipe and cell.figure is not None}


def test_every_row_of_table_4_fine_tunes_a_bert_that_was_pre_trained_as_it_says() -> None:
    rows = [cell for cell in CELLS if cell.metric == "F1" and cell.figure is not None]
    assert len(rows) == 7
    for cell in rows:
        recipe = load_any_recipe(cell.recipe or "")
        assert isinstance(recipe, TextRecipe)
        assert recipe.paper is not None
        assert (recipe.paper.table, recipe.paper.f1) == (4, cell.figure)
        assert (recipe.optimizer.lr, recipe.run.batch, recipe.schedule.updates) == (3e-5, 32, 5530)
        optimizer, rate = cell.row.split(", ")
        second = load_any_recipe((recipe.model.from_run or "").removeprefix("out/").removesuffix("/seed-{seed}"))
        first = load_any_recipe(second.name.removesuffix("-phase2"))
        assert isinstance(first, TextRecipe)
        assert isinstance(second, TextRecipe)
        assert second.model.from_run == f"out/{first.name}/seed-{{seed}}"
        for phase in (first, second):
            assert phase.optimizer.name == ("flambe" if "FLAMBé" in optimizer else "lamb")
            assert phase.decay.kind == ("frobenius" if "FD" in optimizer else "weight")
            assert (phase.factorize.rank_scale or 1.0) == float(rate)
            assert phase.model.hidden == (1024 if cell.grid == "BERT large" else 768)


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
    assert recipe.data.cutout == (16 if model == "wrn28-10" else 0)  # as in the code of Gray et al. (2019)
    times = [float(word[1:]) for word in name.split("-") if word.startswith("x")]  # of a sweep
    assert recipe.decay.strength == pytest.approx(DECAY.get(model, 1e-4) * (times or [1])[0])


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
        assert ratios[0] == (fields.rank_scale if recipe.model.name == "resnet20" else fields.ratio)
    if fields.variant == "wide":
        assert fields.width == (ratios or [3])[0]
    kinds = {"fd": "frobenius", "crs": "crs", "none": "none", "normalized": "normalized"}
    assert recipe.decay.kind == next((kinds[word] for word in words if word in kinds), "weight")
    if "none" in words or "normalized" in words:
        return  # curves beside the one with SI and FD, and drawn as it is
    drawn = "default" if fields.separable else "normal" if recipe.model.name == "vgg19" else "kaiming"
    assert fields.init == ("spectral" if "si" in words else drawn)
