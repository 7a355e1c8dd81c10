"""Reading a table's file: which cells are recipes, and what is wrong with a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from factorized.experiments.recipes.find import load_any_recipe, table_cells, table_names, table_recipes
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.recipes.tables import read_cells

TABLE = """
table = 7
metric = "error"
recipe = { name = "{grid}-{row}{column}", title = "{grid}, {row}, {column}" }
dense = { name = "{grid}", title = "{grid}, dense" }
settings.factorize = { scheme = "low_rank", ratio = 0.1 }

[columns]
whole.dense = true
other.quoted = "them:20"
SI = { name = "-si", settings.factorize.init = "spectral" }

[rows]
FD = { name = "fd", settings.decay.kind = "frobenius" }

[[grid]]
name = "mine/net"
title = "Net"
columns = ["whole", "other", "SI"]
settings.model.name = "resnet8"
rows = { FD = "7.5±0.25 8 *" }
quoted."us:19".Pruning = "- - 9.25"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "table7.toml"
    path.write_text(text)
    return path


def test_cells_of_the_papers_own_are_recipes_and_quoted_ones_are_not(tmp_path: Path) -> None:
    cells = read_cells(write(tmp_path, TABLE))
    assert [(c.row, c.column, c.figure, c.deviation, c.source, c.recipe) for c in cells] == [
        ("FD", "whole", 7.5, 0.25, None, "mine/net"),
        ("FD", "other", 8, None, "them:20", None),
        ("FD", "SI", None, None, None, "mine/net-fd-si"),
        ("Pruning", "SI", 9.25, None, "us:19", None),
    ]
    dense, _, cell, _ = cells
    assert dense.layers[0] == {"title": "Net, dense", "paper": {"table": 7, "accuracy": 92.5, "deviation": 0.25}}
    assert not any("factorize" in layer for layer in dense.layers)
    assert cell.layers[0] == {"title": "Net, FD, SI"}
    assert cell.layers[1:] == (
        {"factorize": {"scheme": "low_rank", "ratio": 0.1}},
        {"model": {"name": "resnet8"}},
        {"decay": {"kind": "frobenius"}},
        {"factorize": {"init": "spectral"}},
    )


def test_settings_may_hold_the_names_of_grid_row_and_column(tmp_path: Path) -> None:
    text = TABLE.replace('kind = "frobenius"', 'norms = "out/{grid}-{row}{column}/seed-{{seed}}"')
    cell = read_cells(write(tmp_path, text))[2]
    assert cell.layers[3] == {"decay": {"norms": "out/mine/net-fd-si/seed-{seed}"}}


def test_a_table_is_found_by_its_name_or_file(tmp_path: Path) -> None:
    figures, tables = ([f"{kind}{number}" for number in (1, 2, 3, 4)] for kind in ("figure", "table"))
    assert table_names() == ["bert", *figures, "language", *tables]
    assert [cell.row for cell in table_cells(str(write(tmp_path, TABLE)))] == ["FD", "FD", "FD", "Pruning"]
    assert len(table_recipes("table3")) == 2 * 4 * 7
    names = [recipe.name for recipe in table_recipes("table1", "cifar10/resnet32x2*0.1*")]
    assert names == [f"cifar10/resnet32x2-lowrank-0.1{way}" for way in ("", "-si", "-fd", "-si-fd")]


def test_recipes_that_are_defined_elsewhere_belong_to_a_table_too(tmp_path: Path) -> None:
    table = TABLE.replace('"frobenius"', '"weight"')  # of the dense network too
    path = str(write(tmp_path, 'also = ["cifar10/resnet32", "cifar10/vgg19"]' + table))
    assert [recipe.name for recipe in table_recipes(path, "*net*")] == [
        "mine/net",
        "mine/net-fd-si",
        "cifar10/resnet32",
    ]
    assert table_recipes(path)[-1] == load_any_recipe("cifar10/vgg19")
    for also, message in (
        ("mine/net", "got several for mine/net"),
        ("cifar10/vgg18", "no recipe 'cifar10/vgg18' .did"),
    ):
        with pytest.raises(ValueError, match=message):
            table_recipes(str(write(tmp_path, f'also = ["{also}"]{table}')))


RANK_SCALES = {f"lowrank-{scale}": scale for scale in (0.037, 0.1111, 0.3333)} | {"full": 1, "wide": 3, "wide-9": 9}


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_figure_2_has_both_decays_at_every_rank_scale(data: str) -> None:
    by_name = {recipe.name: recipe for recipe in table_recipes("figure2", f"{data}/*")}
    for decay, kind in (("wd", "weight"), ("fd", "frobenius")):
        for way, scale in RANK_SCALES.items():
            ninth = (data, scale) == ("cifar10", 0.1111)  # of figures 1 and 3
            recipe = by_name[f"{data}/resnet20-{'lowrank' if ninth else way}-{decay}"]
            assert isinstance(recipe, Recipe)
            assert (recipe.decay.kind, recipe.decay.strength, recipe.factorize.init) == (kind, 1e-4, "kaiming")
            fields = recipe.factorize
            assert scale == (fields.rank_scale or {"full": 1, "wide": fields.width}[fields.variant])


def test_figure_2_has_both_decays_at_strengths_below_and_above_the_papers() -> None:
    strengths: dict[str, list[float]] = {}
    for recipe in table_recipes("figure2", "cifar10/*"):
        if isinstance(recipe, Recipe) and recipe.factorize.rank_scale == 0.1111:
            strengths.setdefault(recipe.decay.kind, []).append(recipe.decay.strength)
    assert set(strengths) == {"weight", "frobenius"}
    assert all(sorted(found) == [3e-5, 1e-4, 3e-4, 1e-3] for found in strengths.values())


def test_figures_1_and_3_are_of_runs_that_record_what_is_drawn() -> None:
    for figure in ("figure1", "figure3"):
        recipes = [recipe for recipe in table_recipes(figure) if isinstance(recipe, Recipe)]
        assert all(recipe.run.diagnose for recipe in recipes)
        assert {"weight", "frobenius", "none", "normalized"} == {recipe.decay.kind for recipe in recipes}


def test_the_example_of_an_own_table_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/reproduce.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    recipes = {recipe.name: recipe for recipe in table_recipes(str(write(tmp_path, example)))}
    assert list(recipes) == [f"own/digits-{kind}-{strength}" for kind in ("wd", "fd") for strength in ("1e-4", "1e-3")]
    assert recipes["own/digits-fd-1e-3"].decay.kind == "frobenius"
    assert recipes["own/digits-fd-1e-3"].decay.strength == 1e-3


@pytest.mark.parametrize(
    ("table", "cells", "message"),
    [
        (
            "tabel3",
            "*",
            "there is no table 'tabel3' to train .did you mean 'table3'..; there are bert, figure1, .*table4",
        ),
        ("table9", "*", "table9 of the paper's appendix shows the runs of table3; reproduce that one"),
        ("table3", "zzz", "no cell of table3 matches 'zzz'; it has cifar10/resnet20, .*, …"),
        ("table7", "*", "table7 of the paper's appendix shows the runs of table2; reproduce that one"),
        ("no.toml", "*", "there is no table file no.toml"),
        (
            "table3",
            "cifar10/resnet33*",
            "no cell of table3 matches 'cifar10/resnet33.'; near ones are cifar10/resnet32",
        ),
        ("table3", "imagenet/*", "no cell of table3 matches 'imagenet/.'; near ones are "),
    ],
)
def test_an_unknown_table_or_cell_lists_near_ones(table: str, cells: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table_recipes(table, cells)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("7.5±0.25 8 *", "7.5 8", r"Net, row 'FD': expected 3 figures \(whole, other, SI\), got 2: '7.5 8'"),
        ("7.5±0.25", "7,5", "Net, row 'FD', column 'whole': expected a figure such as 93.75±0.48, .*got '7,5'"),
        ("9.25", "*", "row 'Pruning', column 'SI': expected a figure .*, - for nothing; got '\\*'"),
        ("{ FD = ", "{ DF = ", r"row 'DF', column 'whole': \[rows\] does not say what 'DF' trains; it has FD"),
        ('["whole",', '["hole",', r"\[columns\] does not say what 'hole' trains; it has whole, other, SI"),
        (
            "{grid}-{row}",
            "{gird}-{row}",
            "{grid}, {row} and {column} in it, and other braces twice, as {{seed}}; got '{gird}-",
        ),
        ('"error"', '"time"', 'recipes aim at one of "error", "accuracy", "F1", got metric = \'time\''),
        (
            'name = "resnet8"',
            'name = "{resnet}"',
            "expected a pattern with {grid}, {row} and {column} in it, and other braces twice, as {{seed}}; got '{res",
        ),
        ('-{row}{column}"', '"', "expected one cell for each recipe, got several for mine/net"),
        ("table = 7", "table = 'seven'", "table: .*valid integer, got 'seven'"),
        ('title = "Net"', 'titel = "Net"', "grid.0.title: Field required.*grid.0.titel: Extra inputs"),
        ("table = 7", "table = ", "not valid TOML"),
    ],
)
def test_a_wrong_table_says_where_and_what_is_expected(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_cells(write(tmp_path, TABLE.replace(old, new)))
    assert str(caught.value).startswith("table7.toml: ")
    assert "\n" not in str(caught.value)
