"""docs/recipes.md says of every field what the code says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from factorized.experiments.recipes.find import check_recipe, merge, read_recipe
from factorized.experiments.recipes.recipe import Factorize, Recipe, Section
from factorized.experiments.recipes.text import Task, TextFactorize, TextRecipe

PAGE = (Path(__file__).parents[3] / "docs/recipes.md").read_text()
TITLES = re.findall(r"^### `\[(\w+)\]`", PAGE, flags=re.MULTILINE)
TEXT_TITLES = re.findall(r"^### Text: `\[(\w+)\]`", PAGE, flags=re.MULTILINE)


def section(recipe: type[Recipe | TextRecipe], name: str) -> type[Section]:
    annotation = recipe.model_fields[name].annotation
    choices = get_args(annotation) or (annotation,)
    return next(choice for choice in choices if isinstance(choice, type) and issubclass(choice, Section))


def documented(title: str) -> dict[str, tuple[str, str]]:
    """Return default and meaning of each field, as the page has them."""
    table = PAGE.split(f"### {title}")[1].split("###")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.+) \|$", table, flags=re.MULTILINE)
    return {field: (default, meaning) for field, default, meaning in rows}


def words(annotation: Any) -> list[str]:
    """Return the words that a field may hold, where it may hold only some."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in words(part)]


def test_every_table_of_a_recipe_is_on_the_page() -> None:
    sections = [name for name in Recipe.model_fields if name not in ("name", "title", "shortened_from")]
    assert sections == TITLES


def test_every_table_of_a_recipe_for_text_is_on_the_page() -> None:
    sections = [name for name in TextRecipe.model_fields if name not in ("name", "title", "shortened_from")]
    of_images = ("paper", "task", "factorize")
    assert [name for name in sections if name not in of_images] == TEXT_TITLES
    about = PAGE.split("## Fields of a recipe for text")[1].split("###")[0]
    assert [task for task in words(Task) if json.dumps(task) not in about] == []
    assert list(TextFactorize.model_fields) == list(Factorize.model_fields)
    inits = [words(cls.model_fields["init"].annotation) for cls in (TextFactorize, Factorize)]
    assert [word for word in inits[0] if word not in inits[1]] == ["network"]


@pytest.mark.parametrize(
    ("recipe", "name", "title"),
    [(Recipe, name, f"`[{name}]`") for name in TITLES] + [(TextRecipe, n, f"Text: `[{n}]`") for n in TEXT_TITLES],
)
def test_every_field_is_on_the_page_with_its_default_and_what_it_may_be(
    recipe: type[Recipe | TextRecipe], name: str, title: str
) -> None:
    fields = section(recipe, name).model_fields
    told = documented(title)
    assert list(told) == list(fields)
    for field, (default, meaning) in told.items():
        info = fields[field]
        expected = "needed" if info.is_required() else "" if info.default is None else f"`{json.dumps(info.default)}`"
        assert default == expected, f"{name}.{field}"
        missing = [word for word in words(info.annotation) if json.dumps(word) not in default + meaning]
        assert not missing, f"{name}.{field} may be {missing}"


def test_the_example_on_the_page_is_the_shipped_recipe() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    name = example.splitlines()[0].split()[3]
    table = tomllib.loads(example)
    whole = merge(read_recipe(table.pop("extends")), table)
    assert check_recipe(whole, "docs") == check_recipe(read_recipe(name), name)


def test_the_commands_on_the_page_name_recipes_that_are_there() -> None:
    from factorized.experiments.recipes.find import recipe_names

    for part in ("resnet32x2", "wrn28-10", "wide", "deep", "full", "cifar10/resnet20-lowrank-"):
        assert part in PAGE
        assert any(part in name for name in recipe_names())
