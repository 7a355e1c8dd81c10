"""The language models that are compared have the sizes that the comparison needs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.models import build_text_model
from factorized.experiments.text.network import plan_text
from factorized.experiments.text.tokenizer import stand_in_tokenizer
from factorized.nn.running import count_parameters
from factorized.planning.plan import Plan
from factorized.surgery.factorize import factorize

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _dense(name: str) -> tuple[TextRecipe, nn.Module]:
    recipe = load_any_recipe(name)
    assert isinstance(recipe, TextRecipe)
    with torch.device("meta"):
        return recipe, build_text_model(recipe, stand_in_tokenizer(recipe.data), 0)


def _low_rank(name: str) -> tuple[TextRecipe, nn.Module, Plan]:
    recipe, model = _dense(name)
    plan = plan_text(recipe, model)
    assert plan is not None
    return recipe, model, plan


@pytest.mark.parametrize("ratio", ["0.5", "0.25"])
@pytest.mark.parametrize("size", ["language/tiny", "language/small"])
def test_a_narrow_dense_decoder_has_the_parameters_of_the_low_rank_one(size: str, ratio: str) -> None:
    _, low_rank, plan = _low_rank(f"{size}-lowrank-{ratio}")
    factorize(low_rank, plan, init="default")
    recipe, narrow = _dense(f"{size}-narrow-{ratio}")
    assert count_parameters(narrow) == pytest.approx(count_parameters(low_rank), rel=0.02)
    whole, _ = _dense(size)
    same = {"name", "title", "model"}
    assert recipe.model_dump(exclude=same) == whole.model_dump(exclude=same)
    assert recipe.model.layers == whole.model.layers


@pytest.mark.parametrize("ratio", [0.5, 0.25])
@pytest.mark.parametrize("size", ["language/tiny", "language/small"])
def test_a_ratio_is_that_of_attention_projections_and_feed_forward(size: str, ratio: float) -> None:
    recipe, model, plan = _low_rank(f"{size}-lowrank-{ratio}")
    before = {name: module.weight.numel() for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    factorize(model, plan, init="default")
    held = {name: count_parameters(model.get_submodule(name)) for name in before}
    changed = [name for name in before if held[name] != before[name]]
    assert Counter(name.rpartition(".")[2] for name in changed) == dict.fromkeys(LAYERS, recipe.model.layers)
    kept = sum(held[name] for name in changed) / sum(before[name] for name in changed)
    assert kept == pytest.approx(ratio, rel=0.02)
