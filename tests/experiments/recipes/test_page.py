"""docs/recipes.md says of every field what the code says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from factorized.experiments.recipes.find import check_recipe, merge, read_recipe
from factorized.experiments.recipes.recipe import Recipe, Section

PAGE = (Path(__file__).parents[3] / "docs/recipes.md").read_text()
TITLES = re.findall(r"^### `\[(\w+)\]`", PAGE, flags=re.MULTILINE)


def section(name: str) -> type[Section]:
    annotation = Recipe.model_fields[name].annotation
    choices = get_args(annotation) or (annotation,)
    return next(choice for choice in choices if isinstance(choice, type) and issubclass(choice, Section))


def documented(name: str) -> dict[str, tuple[str, str]]:
    """Return default and meaning of each field, as the page has them."""
    table = PAGE.split(f"### `[{name}]`")[1].split("###")[0]
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


@pytest.mark.parametrize("name", TITLES)
def test_every_field_is_on_the_page_with_its_default_and_what_it_may_be(name: str) -> None:
    fields = section(name).model_fields
    told = documented(name)
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
