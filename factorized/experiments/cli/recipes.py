"""``factorized recipes``: list and show recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from factorized.experiments.cli.arguments import RecipeName, examples
from factorized.experiments.cli.console import console, plain_table, say
from factorized.experiments.cli.verb import Group, Verb

if TYPE_CHECKING:
    from factorized.experiments.recipes.recipe import Paper

app = typer.Typer(
    cls=Group,
    help="List and show recipes.",
    epilog=examples("factorized recipes ls", "factorized recipes show digits/resnet8-lowrank-0.1-si-fd"),
)
ROOM_FOR_TITLES = 120  # columns below which the paper's column is left out


@app.command(
    "ls", cls=Verb, epilog=examples("factorized recipes ls", "factorized recipes ls wide", "factorized recipes ls -q")
)
def list_recipes(
    part: Annotated[str, typer.Argument(metavar="PART", help="Only names that contain this.")] = "",
    names_only: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the names, one per line.")] = False,
) -> None:
    """List the recipes, with the paper's accuracy for each."""
    from factorized.experiments.recipes.find import load_any_recipe, recipe_names

    found = [name for name in recipe_names() if part in name]
    if not found:
        raise ValueError(f"no recipe has {part!r} in its name; there are {len(recipe_names())}, see them without it")
    if names_only:
        say("\n".join(found))
        return
    out = console()
    titles = ("what it trains",) if out.width >= ROOM_FOR_TITLES else ()
    table = plain_table("recipe", *titles, "paper", "%", numbers=("%",))
    for name in found:
        recipe = load_any_recipe(name)
        where, figure = paper_figure(recipe.paper)
        table.add_row(name, *(recipe.title for _ in titles), where, figure)
    out.print(table)


@app.command(
    "show", cls=Verb, epilog=examples("factorized recipes show cifar10/resnet32x2", "factorized recipes show own.toml")
)
def show_recipe(
    name: RecipeName,
    whole: Annotated[bool, typer.Option("--whole", help="Include what it extends and every default.")] = False,
) -> None:
    """Show a recipe: its file or its table cell, or every field with its value."""
    from factorized.experiments.recipes.find import load_any_recipe, recipe_text
    from factorized.experiments.recipes.toml import to_toml

    recipe = load_any_recipe(name)
    say(to_toml(recipe.to_dict()) if whole else recipe_text(name))


def paper_figure(paper: Paper | None) -> tuple[str, str]:
    """Return the table and the accuracy of the paper that a recipe aims at; empty strings where there is none."""
    if paper is None:
        return "", ""
    where = f"table {paper.table}" if paper.table is not None else f"figure {paper.figure}" if paper.figure else ""
    if paper.accuracy is None:
        return where, ""
    spread = f" ± {paper.deviation:.2f}" if paper.deviation is not None else ""
    return where, f"{paper.accuracy:.2f}{spread}"
