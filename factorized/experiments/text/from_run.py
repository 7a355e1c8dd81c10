"""Training a pre-trained model further: the network and the tokenizer of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from factorized.experiments.recipes.find import check_text_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.models import auto_class
from factorized.experiments.text.tokenizer import load_tokenizer
from factorized.experiments.text.trained import load_text_run
from factorized.experiments.training.result import RESULT, read_result
from factorized.experiments.training.trained import FOLDER, check_files
from factorized.surgery.compose import is_factorized

PRETRAINED = "masked"  # the task of the runs that others continue from
# what the run decides; a recipe may repeat it
FROM_THE_RUN = {
    "model": ("hidden", "layers", "heads", "feed_forward", "dropout", "positions", "tied"),
    "data": ("vocabulary", "lower"),
}


def build_from_run(recipe: TextRecipe, run: str, seed: int) -> nn.Module:
    """Return the network of the recipe's task around the encoder that ``run`` trained, its head drawn with ``seed``.

    A factorized encoder keeps its products, and shrunk heads stay shrunk.
    """
    before = _recipe_of(run)
    _check_recipe(recipe, before, run)
    _, _, loaded, _ = load_text_run(_folder(run))
    trained: Any = loaded
    _check_network(recipe, before, trained, run)
    if recipe.task == before.task:
        return loaded
    auto = auto_class(recipe.task)
    torch.manual_seed(seed)
    model: nn.Module = auto.from_config(trained.config)
    model.add_module(str(model.base_model_prefix), trained.base_model)
    return model


def tokenizer_of_run(run: str) -> Any:
    """Return the tokenizer of a finished run."""
    _recipe_of(run)
    folder = _folder(run)
    check_files(folder, read_result(folder, "text"))
    return load_tokenizer(folder / FOLDER)


def origin(run: str) -> dict[str, Any]:
    """Return recipe and seed of a finished run: the result of one that continues from it holds them, and no path."""
    result = read_result(_folder(run), "text")
    return {"recipe": result["recipe"], "seed": result["seed"], "from_run": result.get("from_run")}


def _folder(run: str) -> Path:
    return Path(run).expanduser()


def _recipe_of(run: str) -> TextRecipe:
    """Return the recipe of a run; raise if it is not one that pre-trained a model."""
    path = _folder(run)
    try:
        before = check_text_recipe(read_result(path, "text")["recipe"], str(path / RESULT))
    except ValueError as error:
        raise ValueError(f"model.from_run = {run!r}: {error}") from None
    if before.task != PRETRAINED:
        raise ValueError(
            f"model.from_run = {run!r} is a run of task {before.task!r}; give one of task {PRETRAINED!r}, such as "
            "bert/tiny"
        )
    return before


def _check_recipe(recipe: TextRecipe, before: TextRecipe, run: str) -> None:
    """Raise if the recipe asks for something that the run decided otherwise."""
    for section, names in FROM_THE_RUN.items():
        for name in names:
            asked, held = (getattr(getattr(which, section), name) for which in (recipe, before))
            if asked != held and name in getattr(recipe, section).changed:
                raise ValueError(
                    f"{section}.{name} = {asked!r}, but model.from_run = {run!r} has {held!r}; remove {section}.{name}"
                )


def _check_network(recipe: TextRecipe, before: TextRecipe, trained: Any, run: str) -> None:
    """Raise if the network of a run cannot be trained as the recipe asks."""
    where = f"model.from_run = {run!r}"
    held = trained.config.max_position_embeddings
    if held < recipe.data.length:
        raise ValueError(
            f"data.length = {recipe.data.length} is more than the {held} positions of {where}; ask for {held} or less, "
            "or pre-train with a larger model.positions"
        )
    if is_factorized(trained) and recipe.factorize.scheme != "none" and recipe.factorize != before.factorize:
        raise ValueError(f"{where} is factorized already, in another way than this recipe asks; remove [factorize]")
