"""Training a pre-trained model further: the network and the tokenizer of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from factorized.experiments.data.extras import need
from factorized.experiments.recipes.text import TextData, TextModel, TextRecipe
from factorized.experiments.text.models import AUTO
from factorized.experiments.text.tokenizer import load_tokenizer
from factorized.experiments.text.trained import load_text_run, read_text_result
from factorized.experiments.training.trained import FOLDER
from factorized.surgery.compose import is_factorized

PRETRAINED = "masked"  # the task of the runs that others go on from
# what the run decides; a recipe may repeat it
FROM_THE_RUN: dict[str, tuple[type[TextModel] | type[TextData], tuple[str, ...]]] = {
    "model": (TextModel, ("hidden", "layers", "heads", "feed_forward", "dropout", "positions", "tied")),
    "data": (TextData, ("vocabulary", "lower")),
}


def build_from_run(recipe: TextRecipe, run: str, seed: int) -> nn.Module:
    """Return the network of the recipe's task around the encoder that ``run`` trained, its head drawn with ``seed``.

    A factorized encoder keeps its products, and shrunk heads stay shrunk.
    """
    before, _, loaded, _ = load_text_run(_folder(run))
    trained: Any = loaded
    _check_recipe(recipe, before, trained, run)
    if recipe.task == before.task:
        return trained
    auto = getattr(need("transformers", "transformers", f"task {recipe.task!r}", "text"), AUTO[recipe.task])
    torch.manual_seed(seed)
    model: nn.Module = auto.from_config(trained.config)
    model.add_module(str(model.base_model_prefix), trained.base_model)
    return model


def tokenizer_of_run(run: str) -> Any:
    """Return the tokenizer of a finished run."""
    read_text_result(_folder(run))  # says what is wrong with a folder that is no run
    return load_tokenizer(_folder(run) / FOLDER)


def _folder(run: str) -> Path:
    return Path(run).expanduser()


def _check_recipe(recipe: TextRecipe, before: TextRecipe, trained: Any, run: str) -> None:
    """Raise if ``trained`` is not what the recipe goes on from."""
    where = f"model.from_run = {run!r}"
    if before.task != PRETRAINED:
        raise ValueError(
            f"{where} is a run of task {before.task!r}; give one of task {PRETRAINED!r}, such as bert/tiny"
        )
    for section, (kind, names) in FROM_THE_RUN.items():
        for name in names:
            asked, held = (getattr(getattr(which, section), name) for which in (recipe, before))
            if asked != held and asked != kind.model_fields[name].get_default():
                raise ValueError(f"{section}.{name} = {asked!r}, but {where} has {held!r}; remove {section}.{name}")
    held = trained.config.max_position_embeddings
    if held < recipe.data.length:
        raise ValueError(
            f"data.length = {recipe.data.length} is more than the {held} positions of {where}; ask for {held} or less, "
            "or pre-train with a larger model.positions"
        )
    if is_factorized(trained) and recipe.factorize.scheme != "none" and recipe.factorize != before.factorize:
        raise ValueError(f"{where} is factorized already, in another way than this recipe asks; remove [factorize]")
