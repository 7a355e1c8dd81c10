"""Reading recipes: what extends what, what replaces what, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from factorized.vision.recipe import BUDGETS
from factorized.vision.recipes import check_recipe, load_recipe, merge

MODEL = '[model]\nname = "resnet8"\n'


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)


def test_a_recipe_extends_another_table_by_table(tmp_path: Path) -> None:
    write(tmp_path, "base", MODEL + "[optimizer]\nlr = 0.3\nmomentum = 0.5\n")
    recipe = load_recipe(write(tmp_path, "own", 'extends = "base.toml"\n[optimizer]\nlr = 0.2\n'))
    assert (recipe.model.name, recipe.optimizer.lr, recipe.optimizer.momentum) == ("resnet8", 0.2, 0.5)


def test_a_recipe_of_ones_own_extends_a_shipped_one_without_its_figure(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "own", 'extends = "cifar10/resnet32x2"\n[schedule]\nepochs = 3\n'))
    assert recipe.paper is None
    assert (recipe.name, recipe.schedule.epochs, recipe.data.name) == ("own", 3, "cifar10")


def test_a_recipe_of_ones_own_extends_a_cell_of_a_table(tmp_path: Path) -> None:
    text = 'extends = "cifar10/resnet32x2-lowrank-0.1-si-fd"\n[factorize]\nrank_scale = 0.5\n'
    recipe = load_recipe(write(tmp_path, "own", text))
    assert (recipe.name, recipe.paper, recipe.decay.kind) == ("own", None, "frobenius")
    assert recipe.factorize.budget == {"rank_scale": 0.5}
    assert recipe.factorize.init == "spectral"
    assert load_recipe("cifar10/resnet32x2-lowrank-0.1-si-fd").factorize.budget == {"ratio": 0.1}


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a", 'extends = "b.toml"\n')
    with pytest.raises(ValueError, match="extends itself, by way of a -> b"):
        load_recipe(write(tmp_path, "b", 'extends = "a.toml"\n').replace("b.toml", "a.toml"))


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_replaces_a_budget_of_another_name(budget: str) -> None:
    value = 3 if budget == "rank" else 0.5
    recipe = load_recipe("digits/resnet8-lowrank-0.1", [f"factorize.{budget}={value}"])
    assert recipe.factorize.budget == {budget: value}


def test_merging_leaves_what_it_was_given_alone() -> None:
    below, above = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    assert merge(below, above) == {"a": {"b": 3, "c": 2}}
    assert below == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ("schedule.epochs=7", ("schedule", "epochs"), 7),
        ("data.flip=true", ("data", "flip"), True),
        ("schedule.milestones=[3, 6]", ("schedule", "milestones"), [3, 6]),
        ("model.name=resnet20", ("model", "name"), "resnet20"),
        ('model.name="resnet20"', ("model", "name"), "resnet20"),
        ("model.name = mine:build", ("model", "name"), "mine:build"),
    ],
)
def test_a_change_is_read_as_toml_and_a_word_needs_no_quotes(
    change: str, field: tuple[str, str], value: object
) -> None:
    recipe = load_recipe("digits/resnet8", [change])
    assert recipe.to_dict()[field[0]][field[1]] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nnam = 'a'\n", "there is no field 'model.nam'; did you mean 'name'\\?; fields here: name"),
        (MODEL + "[optimiser]\nlr = 1\n", "there is no field 'optimiser'; did you mean 'optimizer'\\?"),
        (MODEL + "papr = {table = 1}\n", "there is no field 'model.papr'"),
        (MODEL + "[decay]\nkind = 'l2'\n", "decay.kind: .*'weight'.*, got 'l2'"),
        (MODEL + "[schedule]\nepochs = 0\n", "schedule.epochs: .*greater than 0, got 0"),
        (MODEL + "[schedule]\nepochs = true\n", "schedule.epochs: .*valid integer, got True"),
        (MODEL + "[run]\nbatch = '64'\n", "run.batch: .*valid integer, got '64'"),
        (MODEL + "[data]\nflip = 'no'\n", "data.flip: .*valid boolean, got 'no'"),
        (MODEL + "[optimizer]\nlr = inf\n", "optimizer.lr: .*finite number, got inf"),
        (MODEL + "[decay]\nstrength = nan\n", "decay.strength: .*finite number, got nan"),
        ("name = '../../home'\n" + MODEL, "name: runs land in OUT/NAME: .*got '../../home'"),
        ("name = '/home'\n" + MODEL, "name: runs land in OUT/NAME: .*got '/home'"),
        ("name = ''\n" + MODEL, "name: runs land in OUT/NAME: .*got ''"),
        (MODEL + "[factorize]\nscheme = 'low_rank'\n", "low_rank needs a budget"),
        (MODEL + "[factorize]\nratio = 0.1\n", "needs a scheme"),
        (MODEL + "[factorize]\nscheme = 'low_rank'\nratio = 0.1\nrank = 3\n", "give one of"),
        (MODEL + "[decay]\nkind = 'frobenius'\n", "acts on products"),
        (MODEL + "[decay]\nkind = 'normalized'\n", "norms of another run"),
        ("title = 'x'\n", "model: Field required"),
        ("title = \n", "not valid TOML"),
        ("extends = 3\n", "extends must be the name of a recipe, got 3"),
        ("extends = 'cifar10/resnet33'\n", "did you mean 'cifar10/resnet32'\\?"),
    ],
)
def test_a_wrong_recipe_says_where_and_what_there_is(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(write(tmp_path, "own", text))
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"nmae.*scedule") as caught:
        check_recipe({"model": {"name": "resnet8", "nmae": 1}, "scedule": {}}, "own")
    assert str(caught.value).startswith("own: ")
