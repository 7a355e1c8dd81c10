from __future__ import annotations

import pytest

from factorized.experiments.recipes.find import check_text_recipe, load_any_recipe, load_recipe, recipe_names
from factorized.experiments.recipes.text import TextRecipe, TextSchedule

TEXT = [name for name in recipe_names() if name.split("/")[0] in ("bert", "language", "translation", "squad")]


@pytest.mark.parametrize("name", TEXT)
def test_every_recipe_of_text_is_valid_and_reads_back_from_its_own_data(name: str) -> None:
    recipe = load_any_recipe(name)
    assert isinstance(recipe, TextRecipe)
    assert check_text_recipe(recipe.to_dict(), name) == recipe


def test_a_recipe_of_text_is_none_of_images() -> None:
    with pytest.raises(ValueError, match=r"language/tiny is a recipe of text \(task 'language'\)"):
        load_recipe("language/tiny")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.heads=3"], "heads = 3 must divide hidden = 128"),
        (["model.kv_heads=3"], "kv_heads = 3 must divide heads = 4"),
        (["run.tokens=10"], "run.tokens = 10 is for translation, and task is language: remove it"),
        (["data.mask=0.3"], "data.mask = 0.3 is for masked"),
        (["optimizer.name=flambe"], 'decays products: set decay.kind = "frobenius"'),
        (["run.accumulate=3"], "run.batch = 16 must be a multiple of run.accumulate = 3"),
        (["decay.kind=frobenius", "decay.forms=[]"], "at least 1 item"),
        (['decay.forms=["qk"]'], 'is for kind = "frobenius"'),
        (["decay.rest=0.5"], 'rest = 0.5 is for kind = "frobenius", got kind = "weight"'),
        (["model.name=bert"], "expected hf:FOLDER"),
        (["schedule.update=3"], "there is no field 'schedule.update' (did you mean 'updates'"),
    ],
)
def test_a_wrong_recipe_of_text_says_what_is_allowed(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("[", r"\[")):
        load_any_recipe("language/tiny", changes)


def test_schedules_warm_up_and_fall_as_their_names_say() -> None:
    cosine = TextSchedule(updates=100, warmup=10.0, shape="cosine", floor=0.1)
    assert [cosine.factor(update) for update in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert cosine.factor(10) == pytest.approx(1.0)
    assert cosine.factor(55) == pytest.approx(0.55)
    assert cosine.factor(100) == pytest.approx(0.1)
    root = TextSchedule(updates=100, warmup=4.0, shape="inverse_sqrt")
    assert root.factor(3) == 1.0
    assert root.factor(15) == pytest.approx(0.5)
    linear = TextSchedule(updates=100, warmup=0.1, shape="linear")
    assert linear.warmup_updates == 10
    assert linear.factor(55) == pytest.approx(0.5)
    assert TextSchedule(updates=100, warmup=0.0, shape="constant").factor(99) == 1.0
