"""Every recipe: it names itself, is valid, can be planned, and trains."""

from __future__ import annotations

import math
import tomllib
from itertools import product
from pathlib import Path

import pytest
import torch

from factorized.experiments.data.stand_in import known_shape, stand_in
from factorized.experiments.recipes.find import (
    check_recipe,
    load_recipe,
    merge,
    read_recipe,
    recipe_names,
    recipe_text,
)
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.network import build_dense, plan_network
from factorized.experiments.training.train import train
from factorized.nn.running import count_parameters

NAMES = [name for name in recipe_names() if "task" not in read_recipe(name)]
RECIPES = {name: load_recipe(name) for name in NAMES}
HEAVY = ("vgg19", "wrn28-10", "resnet110", "resnet56")
BATCH = 2


def one_of_each_kind() -> list[str]:
    """Return the first recipe of every combination of model, scheme, decay and init that is not heavy."""
    kinds: dict[tuple[object, ...], str] = {}
    for name, recipe in RECIPES.items():
        fields = recipe.factorize
        kind = (recipe.model.name, fields.scheme, fields.variant, recipe.decay.kind, fields.init)
        if recipe.model.name not in HEAVY and recipe.data.name != "tiny-imagenet":
            kinds.setdefault(kind, name)
    return list(kinds.values())


LIGHT = one_of_each_kind()


def named(text: str) -> list[str]:
    """Return the names that ``text`` stands for: words in a row, each ``a|b`` for one or the other."""
    return ["".join(words) for words in product(*(part.split("|") for part in text.split()))]


def test_these_are_the_recipes() -> None:
    ours = "|-si|-fd|-si-fd"
    over = "|-full-wd|-full-fd|-deep-wd|-deep-fd|-wide-wd|-wide-fd"
    expected = [
        *named("cifar10/|cifar100/|tiny-imagenet/ vgg19|resnet32x2"),
        *(f"{name}{way}" for name in named("cifar10/|cifar100/ vgg19|resnet32x2 -lowrank- 0.1|0.05|0.02")
          for way in ours.split("|")),
        *(f"{name}{way}" for name in named("tiny-imagenet/vgg19-lowrank- 0.1|0.05|0.02") for way in ours.split("|")),
        *(f"{name}{way}" for name in named("tiny-imagenet/resnet32x2-lowrank- 0.15|0.1|0.05")
          for way in ours.split("|")),
        "cifar10/wrn28-10",
        *(f"{name}{si}" for name in named("cifar10/wrn28-10- lowrank|tt|tucker - 0.01667|0.06667 - wd|crs|fd")
          for si in ("", "-si")),
        *(f"{name}{way}" for name in named("cifar10/|cifar100/ resnet20|resnet32|resnet56|resnet110")
          for way in over.split("|")),
        *named("cifar10/resnet20-lowrank- wd|fd|si|si-fd|none|normalized"),
        *named("cifar10/resnet20-lowrank-x0.3|cifar10/resnet20-lowrank-x3|cifar10/resnet20-lowrank-x10 -wd|-fd"),
        *named("cifar10/|cifar100/ resnet20- lowrank-0.037|lowrank-0.3333|wide-9 -wd|-fd"),
        *named("cifar100/resnet20-lowrank-0.1111- wd|fd"),
        *(f"digits/resnet8-lowrank-0.1{way}" for way in ours.split("|")),
        *named("digits/resnet8- wide-fd|tt-0.1-si-fd|tucker-0.1-si-fd"),
        "digits/resnet8",
    ]  # fmt: skip
    assert sorted(expected) == NAMES
    assert len(NAMES) == len(set(NAMES)) == 205


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_shown_below_its_launch_command_as_a_recipe_of_its_own(name: str) -> None:
    text = recipe_text(name)
    embedded = RECIPES[name].data.name == "digits"
    assert text.splitlines()[0] == f"# factorized train {name}" + ("" if embedded else " --data DIR")
    table = tomllib.loads(text)
    parent = table.pop("extends", None)
    below = {} if parent is None else read_recipe(parent)
    assert check_recipe({"name": name, **merge(below, table)}, name) == RECIPES[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is_and_aims_at_a_figure_of_the_paper(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.name == name
    assert recipe.title
    assert recipe.data.name == name.split("/")[0]
    if recipe.paper is None:  # nothing of the paper is on digits, and its table 3 begins with 32 layers
        assert recipe.data.name == "digits" or recipe.model.name == "resnet20"
        return
    assert (recipe.paper.table is None) != (recipe.paper.figure is None)
    assert recipe.paper.accuracy is not None or recipe.paper.figure is not None
    assert recipe.paper.accuracy is None or 20 < recipe.paper.accuracy < 100


def one_of_each_plan() -> list[str]:
    """Return the first recipe of every plan: the decay and the initialization make no difference to it."""
    plans: dict[tuple[str, str, str], str] = {}
    for name, recipe in RECIPES.items():
        if recipe.factorize.scheme != "none":
            fields = recipe.factorize.model_copy(update={"init": None})
            plans.setdefault((recipe.model.name, recipe.data.name, fields.model_dump_json()), name)
    return list(plans.values())


@pytest.mark.parametrize("name", one_of_each_plan())
def test_a_recipe_can_be_planned_and_meets_its_budget(name: str) -> None:
    recipe = RECIPES[name]
    shape = known_shape(recipe.data.name)
    assert shape is not None
    images = stand_in(recipe.data.name, *shape)
    with torch.device("meta"):
        dense = build_dense(recipe, images, seed=0)
        plan = plan_network(recipe, dense, images)
    assert plan is not None
    assert plan.params == count_parameters(dense)
    ratio = recipe.factorize.ratio
    assert ratio is None or 0.99 * ratio < plan.ratio <= ratio
    assert (plan.ratio > 1) == (recipe.factorize.scheme == "overcomplete")


def train_two_steps(recipe: Recipe, folder: Path) -> None:
    """Train for two steps on noise of the data's shape, with norms to follow where the recipe follows some."""
    shape = known_shape(recipe.data.name)
    assert shape is not None
    images = stand_in(recipe.data.name, *shape, count=2 * BATCH)
    run = recipe.run.model_copy(update={"batch": BATCH, "compile": "no", "diagnose": False})
    schedule = recipe.schedule.model_copy(update={"epochs": 1})
    decay = recipe.decay
    if decay.kind == "normalized":
        recorded = decay.model_copy(update={"kind": "none", "norms": None, "record_norms": True})
        first = recipe.model_copy(update={"run": run, "schedule": schedule, "decay": recorded})
        train(first, images, folder / "recorded", device="cpu")
        decay = decay.model_copy(update={"norms": str(folder / "recorded/seed-{seed}")})
    short = recipe.model_copy(update={"run": run, "schedule": schedule, "decay": decay})
    (result,) = train(short, images, folder / "run", device="cpu")
    assert math.isfinite(result["history"][-1]["loss"])
    assert result["recipe"]["name"] == recipe.name


@pytest.mark.parametrize("name", LIGHT)
def test_a_recipe_trains(name: str, tmp_path: Path) -> None:
    train_two_steps(RECIPES[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NAMES if name not in LIGHT])
def test_a_heavier_recipe_trains(name: str, tmp_path: Path) -> None:
    train_two_steps(RECIPES[name], tmp_path)
