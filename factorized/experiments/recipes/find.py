"""Finding, reading and checking recipes: cells of the paper's tables, shipped files and the user's own."""

from __future__ import annotations

import difflib
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, reduce
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from factorized.experiments.data.explain import nearest, rule
from factorized.experiments.recipes.recipe import BUDGETS, Named, Recipe, Section, is_used_by
from factorized.experiments.recipes.tables import Cell, read_cells
from factorized.experiments.recipes.text import AnyRecipe, TextRecipe
from factorized.experiments.recipes.toml import to_toml

SHIPPED = Path(__file__).parent
# tables of the appendix, and those whose runs they show
TRAINED_BY = {"table5": "table1", "table6": "table1", "table7": "table2", "table8": "table3", "table9": "table3"}
Table = dict[str, Any]
Kind = TypeVar("Kind", Recipe, TextRecipe)


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package, such as ``"cifar10/resnet32x2"``."""
    files = (path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.glob("*/*.toml"))
    return sorted((*files, *_recipes_of_tables()))


@cache
def paper_cells() -> tuple[Cell, ...]:
    """Return every figure of the paper's tables, its own and those it quotes, with the recipes that aim at them."""
    every = (cell for path in sorted(SHIPPED.glob("*.toml")) for cell in _cells_of(path))
    return tuple(cell for cell in every if cell.recipe is None or cell.defines_recipe)


def table_names() -> list[str]:
    """Return the tables that hold recipes, such as ``"table1"``: their files' names."""
    return [path.stem for path in sorted(SHIPPED.glob("*.toml")) if any(cell.recipe for cell in _cells_of(path))]


def table_cells(name: str) -> tuple[Cell, ...]:
    """Return the cells of a table by name, or of the user's own file; an unknown name raises with near ones."""
    own = Path(name)
    if own.suffix == ".toml":
        if not own.is_file():
            raise ValueError(f"there is no table file {own}")
        return tuple(read_cells(own))
    if name in TRAINED_BY:
        raise ValueError(f"{name} of the paper's appendix shows the runs of {TRAINED_BY[name]}; reproduce that one")
    if name not in table_names():
        known = ", ".join(table_names())
        raise ValueError(f"there is no table {name!r} to train{nearest(name, table_names())}; there are {known}")
    return _cells_of(SHIPPED / f"{name}.toml")


def cell_recipe(cell: Cell) -> AnyRecipe:
    """Return the recipe of a cell that has one, checked."""
    name = cell.recipe or ""
    if not cell.defines_recipe:
        return load_any_recipe(name)
    return check_any_recipe(reduce(merge, cell.layers, {"name": name}), name)


def table_recipes(name: str, pattern: str = "*") -> list[AnyRecipe]:
    """Return the recipes of a table whose names match ``pattern``, such as ``cifar10/*0.1*``, in the table's order."""
    recipes = {cell.recipe: cell for cell in table_cells(name) if cell.recipe is not None}
    if not recipes:
        raise ValueError(f"{name} has no cells to train: a grid with a name has recipes")
    found = [cell_recipe(cell) for recipe, cell in recipes.items() if fnmatchcase(recipe, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern.replace("*", ""), recipes, n=3, cutoff=0.3)
        some = ", ".join([*list(recipes)[:3], *(["…"] if len(recipes) > 3 else [])])
        told = f"near ones are {', '.join(near)}" if near else f"it has {some}"
        raise ValueError(f"no cell of {name} matches {pattern!r}; {told}")
    return found


@cache
def _cells_of(path: Path) -> tuple[Cell, ...]:
    return tuple(read_cells(path))


@cache
def _recipes_of_tables() -> Mapping[str, Cell]:
    return {cell.recipe: cell for cell in paper_cells() if cell.recipe is not None}


def recipe_path(name: str) -> Path:
    """Return the file of a shipped recipe that is not a cell of a table, or the user's own file."""
    own = Path(name)
    if own.suffix == ".toml":
        if not own.is_file():
            raise ValueError(f"there is no recipe file {own}")
        return own
    if name in recipe_names():
        return SHIPPED / f"{name}.toml"
    raise ValueError(f"there is no recipe {name!r}{nearest(name, recipe_names())}; `factorized recipes ls` lists them")


def recipe_text(name: str) -> str:
    """Return a recipe as TOML, below the command that trains it: its file, or a table's cell written out."""
    if name not in _recipes_of_tables():
        return recipe_path(name).read_text(encoding="utf-8-sig").rstrip()
    table = read_recipe(name)
    fields = (TextRecipe if "task" in table else Recipe).model_fields
    ordered = {key: table[key] for key in fields if key in table}
    embedded = "task" in table and not table["data"].get("train")
    return f"# factorized train {name}{'' if embedded else ' --data DIR'}\n{to_toml(ordered)}"


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """Return a recipe of images by name or path, checked; ``changes`` are ``"section.field=value"``, as in TOML."""
    recipe = load_any_recipe(name, changes)
    if isinstance(recipe, TextRecipe):
        raise ValueError(f"{name} is a recipe of text (task {recipe.task!r}); this needs one of images")
    return recipe


def load_any_recipe(name: str, changes: Sequence[str] = ()) -> AnyRecipe:
    """Return a recipe of images or of text by name or path, checked, with ``changes``."""
    table = change_table(read_recipe(name), changes)
    own = name.endswith(".toml")  # a file of the user, whose folder is not part of its name
    table = {"name": Path(name).stem if own else name, **table}
    return check_any_recipe(table, name)


def check_any_recipe(table: Mapping[str, Any], source: str) -> AnyRecipe:
    """Return the recipe in ``table``: one of text if it names a task, else one of images."""
    return check_text_recipe(table, source) if "task" in table else check_recipe(table, source)


def check_recipe(table: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe of images in ``table``; every mistake in it is one line, with the nearest name there is."""
    return _checked(Recipe, table, source)


def check_text_recipe(table: Mapping[str, Any], source: str) -> TextRecipe:
    """Return the recipe of text in ``table``; every mistake in it is one line, with the nearest name there is."""
    return _checked(TextRecipe, table, source)


def _checked(kind: type[Kind], table: Mapping[str, Any], source: str) -> Kind:
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ValueError(f"{source}: " + "; ".join(_explain(kind, e) for e in error.errors())) from None


def read_recipe(name: str, seen: tuple[Path, ...] = ()) -> Table:
    """Return a recipe's table with those it ``extends`` below it."""
    if name in _recipes_of_tables():
        return reduce(merge, _recipes_of_tables()[name].layers, {})
    path = recipe_path(name)
    if path.resolve() in seen:
        raise ValueError(f"{name}: extends itself, by way of {' -> '.join(p.stem for p in seen)}")
    try:
        table = _parse(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if not isinstance(parent, str):
        raise ValueError(f"{name}: extends must be the name of a recipe, got {parent!r}")
    beside = path.parent / parent
    base = read_recipe(str(beside) if beside.is_file() else parent, (*seen, path.resolve()))
    for own in ("name", "paper"):  # a name and a figure belong to one recipe
        base.pop(own, None)
    return merge(base, table)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Table:
    """Return ``below`` overridden by ``above``, table by table.

    A budget replaces a budget of any name, and another scheme drops the fields that it does not use.
    """
    merged = dict(below)
    if any(name in above for name in BUDGETS):
        merged = {key: value for key, value in merged.items() if key not in BUDGETS}
    if (scheme := above.get("scheme", below.get("scheme"))) != below.get("scheme"):
        merged = {key: value for key, value in merged.items() if is_used_by(scheme, key)}
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def change_table(table: Table, changes: Sequence[str]) -> Table:
    """Return ``table`` with ``changes``, each ``"section.field=value"``, made to it in order."""
    for change in changes:
        table = merge(table, _parse_change(change))
    return table


def _parse_change(change: str) -> Table:
    key, separator, value = change.partition("=")
    if not (separator and "." in key and change.isprintable()):
        raise ValueError(f"a change is section.field=value, such as schedule.epochs=10; got {change!r}")
    try:
        return _parse(f"{key.strip()} = {value}")
    except ValueError:
        try:
            return _parse(f"{key.strip()} = '{value.strip()}'")  # a word without quotes
        except ValueError:
            raise ValueError(
                f"cannot read {change!r}: a value is a number, true, false, a word or a TOML list"
            ) from None


def _parse(text: str) -> Table:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _explain(recipe: type[Named], error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        *tables, field = error["loc"]
        known = _fields(recipe, tables)
        return f"there is no field {where!r}{nearest(str(field), known)}; fields here: {', '.join(known)}"
    if error["type"] == "missing":
        return f'{where} is missing: a recipe names its network, as [model] name = "resnet8", or extends one that does'
    message = rule(error["msg"])
    if error["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}: {message}, got {reprlib.repr(error['input'])}"


def _fields(recipe: type[Named], tables: Sequence[Any]) -> list[str]:
    section: type[BaseModel] = recipe
    for table in tables:
        annotation = section.model_fields[str(table)].annotation
        choices = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        section = next(choice for choice in choices if isinstance(choice, type) and issubclass(choice, Section))
    return list(section.model_fields)
