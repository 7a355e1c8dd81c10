"""Shortened recipes: fewer epochs or updates, with the learning rate falling at the same shares of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.recipes.text import AnyRecipe, TextRecipe

Kind = TypeVar("Kind", bound=AnyRecipe)


def unit_of(recipe: AnyRecipe) -> str:
    """Return what the length of a recipe is counted in: "epochs" or "updates"."""
    return "updates" if isinstance(recipe, TextRecipe) else "epochs"


def length_of(recipe: AnyRecipe) -> int:
    """Return how many epochs or updates a recipe trains."""
    return recipe.schedule.updates if isinstance(recipe, TextRecipe) else recipe.schedule.epochs


def shorten(recipe: Kind, length: int) -> Kind:
    """Return the recipe with ``length`` epochs or updates, marked as shortened; one that has no more is returned as is.

    Milestones and warm-up keep their share of the training.
    """
    whole = length_of(recipe)
    if length >= whole:
        return recipe
    fields = _text_fields(recipe, length) if isinstance(recipe, TextRecipe) else _image_fields(recipe, length)
    shortened: Any = recipe.model_copy(update={**fields, "shortened_from": whole})
    return shortened


def _text_fields(recipe: TextRecipe, length: int) -> dict[str, Any]:
    schedule, run = recipe.schedule, recipe.run
    often = {name: min(getattr(run, name), length) for name in ("evaluate_every", "checkpoint_every")}
    shorter = {"updates": length, "warmup": schedule.warmup_updates / schedule.updates}
    return {"schedule": schedule.model_copy(update=shorter), "run": run.model_copy(update=often)}


def _image_fields(recipe: Recipe, length: int) -> dict[str, Any]:
    schedule = recipe.schedule
    shares = [at if at < 1 else at / schedule.epochs for at in schedule.milestones]
    shorter = {
        "epochs": length,
        "milestones": [share for share in shares if share < 1],
        "warmup_epochs": min(schedule.warmup_epochs, length - 1),
    }
    return {"schedule": schedule.model_copy(update=shorter)}


def shortening(recipe: Mapping[str, Any]) -> str:
    """Return "3 of 200 epochs" for the data of a shortened recipe, as a result holds it; nothing for a whole one."""
    whole = recipe.get("shortened_from")
    if whole is None:
        return ""
    unit = "updates" if "updates" in recipe["schedule"] else "epochs"
    return f"{recipe['schedule'][unit]:,} of {whole:,} {unit}"
