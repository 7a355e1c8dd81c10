"""Loads the data of a recipe, and computes their checksum."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from factorized.experiments.data.images import Images
from factorized.experiments.data.load import data_folder, load_images
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.recipes.text import AnyRecipe, TextRecipe

if TYPE_CHECKING:
    from factorized.experiments.text.corpus import Corpus


def images_of(recipe: Recipe, data: str | None) -> Images:
    """Return the images of a recipe; ``data`` is the folder of data sets."""
    return _images(recipe.data.name, data)


@lru_cache(maxsize=1)  # the next recipe of a table often has the same
def _images(name: str, data: str | None) -> Images:
    return load_images(name, sets_folder(data))


def corpus_of(recipe: TextRecipe, data: str | None) -> Corpus:
    """Return the text of a recipe, tokenized; its files are looked for in the folder ``data``."""
    from factorized.experiments.text.corpus import load_corpus

    return load_corpus(recipe, _text_folder(recipe, data), data_folder() / "packed")


def data_checksum(recipe: AnyRecipe, data: str | None) -> str:
    """Return the checksum of the recipe's data; a ``ValueError`` where they are not there."""
    if isinstance(recipe, Recipe):
        return images_of(recipe, data).checksum
    from factorized.experiments.text.corpus import corpus_checksum

    return corpus_checksum(recipe, _text_folder(recipe, data))


def _text_folder(recipe: TextRecipe, data: str | None) -> Path | None:
    return sets_folder(data) if recipe.data.train else None  # None: the text comes with the package


def sets_folder(data: str | None) -> Path | None:
    """Return the folder of data sets that was given, which has to be there; None for the usual one."""
    if data is None:
        return None
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--data: there is no folder {data}; give the folder that holds the data sets")
    return folder
