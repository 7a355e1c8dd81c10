"""The recipes of the paper's section 6 train as the paper does."""

from __future__ import annotations

from typing import Any

import pytest

from factorized.experiments.recipes.find import load_any_recipe, recipe_names
from factorized.experiments.recipes.text import TextRecipe

NAMES = [name for name in recipe_names() if name.startswith(("bert/base", "bert/large", "translation/"))]


def recipe_of(name: str) -> TextRecipe:
    recipe = load_any_recipe(name)
    assert isinstance(recipe, TextRecipe)
    return recipe


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("bert/")])
def test_bert_is_pre_trained_in_two_phases_as_the_paper_says(name: str) -> None:
    recipe = recipe_of(name)
    schedule = recipe.schedule
    assert (recipe.optimizer.clip, schedule.shape, recipe.decay.strength) == (1.0, "linear", 0.01)
    assert (recipe.model.positions, recipe.data.mask, recipe.data.lower) == (512, 0.15, True)
    phase = (recipe.data.length, recipe.run.batch, recipe.optimizer.lr, schedule.warmup, schedule.updates)
    if name.endswith("-phase2"):
        assert phase == (512, 32_768, 4e-3, 0.128, 1_563)
        assert recipe.model.from_run == f"out/{name.removesuffix('-phase2')}/seed-{{seed}}"
    else:
        assert phase == (128, 65_536, 6e-3, 0.2843, 7_038)
        assert recipe.model.from_run is None


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("bert/")])
def test_the_optimizer_of_a_bert_is_the_one_in_its_name(name: str) -> None:
    recipe, words = recipe_of(name), name.removesuffix("-phase2").split("-")[1:]
    assert recipe.optimizer.name == ("flambe" if "flambe" in words else "lamb")
    products = "flambe" in words or "fd" in words
    assert (recipe.decay.kind, recipe.decay.forms) == (("frobenius", ["ov"]) if products else ("weight", None))
    if "0.5" in words:
        assert (recipe.factorize.rank_scale, recipe.factorize.attention) == (0.5, "heads")
        assert recipe.factorize.init == ("spectral" if products else None)
    else:
        assert recipe.factorize.scheme == "none"
        assert recipe.model.attention_init == ("spectral" if products else "default")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("translation/iws", "translation/tat"))])
def test_a_translator_is_trained_as_the_paper_says(name: str) -> None:
    recipe = recipe_of(name)
    model, optimizer, schedule, run = recipe.model, recipe.optimizer, recipe.schedule, recipe.run
    assert (model.hidden, model.feed_forward, model.heads, model.layers, model.dropout) == (256, 1024, 4, 2, 0.2)
    assert (optimizer.name, optimizer.lr, optimizer.momentum, optimizer.nesterov) == ("sgd", 0.25, 0.99, True)
    assert (optimizer.clip, schedule.shape, schedule.warmup_updates) == (0.1, "inverse_sqrt", 4_000)
    assert schedule.updates == (100_000 if "iwslt14" in name else 20_000)
    assert (run.tokens, run.label_smoothing, run.beam) == (4_000, 0.1, 5)


SERIES: dict[str, tuple[str, list[str] | None]] = {
    "": ("none", None),
    "-wd": ("weight", None),
    "-fd-ov": ("frobenius", ["ov"]),
    "-fd-ov-qk": ("frobenius", ["ov", "qk"]),
}


@pytest.mark.parametrize("corpus", ["iwslt14", "tatoeba"])
def test_every_series_of_figure_5_is_there(corpus: str) -> None:
    for way, (kind, forms) in SERIES.items():
        recipe = recipe_of(f"translation/{corpus}{way}")
        assert (recipe.decay.kind, recipe.decay.forms) == (kind, forms)
        assert recipe.factorize.scheme == "none"
        assert recipe.decay.rest == (0.0 if forms else None)  # the figure's curves decay nothing but the forms
    for ratio in (0.5, 0.25):
        for way, init in (("", "network"), ("-si", "spectral")):
            recipe = recipe_of(f"translation/{corpus}-{ratio}{way}")
            fields: Any = recipe.factorize
            assert (fields.rank_scale, fields.init, fields.attention) == (ratio, init, "heads")
            assert not fields.keep_first_and_last  # embeddings and the output layer too
            assert recipe.decay.kind == "none"


@pytest.mark.parametrize(
    ("way", "init", "kind"),
    [
        ("", "default", "weight"),
        ("-si", "spectral", "weight"),
        ("-fd", "default", "frobenius"),
        ("-si-fd", "spectral", "frobenius"),
    ],
)
@pytest.mark.parametrize("ratio", [0.5, 0.25])
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_low_rank_decoders_differ_by_what_their_names_say(
    size: str, ratio: float, way: str, init: str, kind: str
) -> None:
    recipe = recipe_of(f"language/{size}-lowrank-{ratio}{way}")
    assert (recipe.factorize.ratio, recipe.factorize.of, recipe.factorize.init) == (ratio, "selected", init)
    assert (recipe.decay.kind, recipe.optimizer.name, recipe.schedule.shape) == (kind, "adamw", "cosine")
