"""The names of models, which are apart from what builds them."""

from __future__ import annotations

from pathlib import Path

from factorized.experiments.models import build
from factorized.experiments.models.names import MODELS

PAGE = (Path(__file__).parents[3] / "docs/recipes.md").read_text()


def test_the_names_are_those_that_can_be_built() -> None:
    assert tuple(build._BUILDERS) == MODELS


def test_the_page_of_recipes_names_the_models() -> None:
    residual = ("resnet20", "resnet32", "resnet44", "resnet56")  # "`resnet8` to `resnet110`"
    assert [name for name in MODELS if f"`{name}`" not in PAGE and name not in residual] == []
