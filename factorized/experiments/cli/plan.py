"""``factorized plan``: show which layers are factorized, at which ranks, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factorized.experiments.cli.arguments import (
    Changes,
    Data,
    complete_model,
    complete_recipe,
    complete_scheme,
    complete_variant,
    examples,
)
from factorized.experiments.cli.console import say
from factorized.experiments.cli.text import plan_recipe
from factorized.experiments.data.explain import writing_to
from factorized.experiments.models.names import MODELS, MOST_CLASSES, MOST_VALUES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from factorized.experiments.data.images import Images
    from factorized.experiments.recipes.recipe import Recipe
    from factorized.experiments.recipes.text import AnyRecipe
    from factorized.planning.plan import Plan

EXAMPLES = examples(
    "factorized plan cifar10/resnet32x2-lowrank-0.1-si-fd",
    "factorized plan cifar10/resnet32x2-lowrank-0.1 --set factorize.ratio=0.05 --html plan.html",
    "factorized plan --model vgg19 --ratio 0.02 --classes 200 --size 64",
    "factorized plan --model mymodels:small --macs 0.3",
    "factorized plan --model resnet32 --scheme overcomplete --variant wide",
)


def plan(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A recipe of `factorized recipes ls`, or the path of your own .toml file.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A model instead of a recipe: resnet32, vgg19 and others, or module:function.",
            autocompletion=complete_model,
        ),
    ] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of the parameters to keep.")] = None,
    rank_scale: Annotated[float | None, typer.Option(help="Share of full rank, as in the paper.")] = None,
    rank: Annotated[int | None, typer.Option(help="One rank for all layers.")] = None,
    energy: Annotated[float | None, typer.Option(help="Share of the squared singular values of each layer.")] = None,
    macs: Annotated[float | None, typer.Option(help="Share of the multiply-accumulates to keep.")] = None,
    of: Annotated[
        str | None,
        typer.Option(
            metavar="model|selected",
            help="What --ratio and --macs are a share of: the model, or the factorized layers.",
        ),
    ] = None,
    multiple_of: Annotated[int | None, typer.Option(help="Round ranks to multiples of this number.")] = None,
    min_size: Annotated[int | None, typer.Option(help="Leave layers with fewer parameters dense.")] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help="low_rank (the default), overcomplete, tensor_train, tucker, monarch or kronecker.",
            autocompletion=complete_scheme,
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            metavar="full|deep|wide",
            help="The variant of overcomplete.",
            autocompletion=complete_variant,
        ),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, max=MOST_CLASSES, help="With --model: number of classes; by default 10.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="With --model: height and width of the images; by default 32.")
    ] = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="With --model: channels of the images; by default 3.")
    ] = None,
    changes: Changes = None,
    data: Data = None,
    html: Annotated[Path | None, typer.Option(help="Also write the plan to this HTML page.")] = None,
) -> None:
    """Show which layers a recipe or a budget factorizes, at which ranks, and what that saves."""
    from factorized.experiments.cli.images import load_data
    from factorized.experiments.recipes.text import TextRecipe
    from factorized.experiments.training.network import build_dense, plan_network

    if (name is None) == (model is None):
        raise ValueError("give the name of a recipe, or a model with --model, and not both; see factorized plan --help")
    if (classes or size or channels) and (name is not None or data is not None):
        raise ValueError(
            "--classes, --size and --channels are for a --model without images; a recipe and --data have their own"
        )
    if html is not None and html.suffix != ".html":
        raise ValueError(f"--html {html}: the name of a page must end in .html")
    budgets = {"ratio": ratio, "rank_scale": rank_scale, "rank": rank, "energy": energy, "macs": macs}
    choices = {"of": of, "multiple_of": multiple_of, "min_size": min_size}
    fields = {"scheme": scheme, "variant": variant, **budgets, **choices}
    given: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
    if model is not None:
        shape = _checked_shape(classes or 10, size or 32, channels or 3)
        recipe = _recipe_of_model(model, given, changes or ())
        recipe, images = _without_data(recipe, shape) if data is None else load_data(recipe, data)
    else:
        read = _named_recipe(str(name), given, changes or ())
        if isinstance(read, TextRecipe):
            _show(read.name, *plan_recipe(read), html)
            return
        recipe, images = _images_of(read, data)
    if variant is not None and recipe.factorize.scheme != "overcomplete":
        raise ValueError(
            f"--variant {variant} is for --scheme overcomplete, and the scheme is {recipe.factorize.scheme}; drop it"
        )
    with _weights_if_needed(recipe):
        dense = build_dense(recipe, images, seed=0)
        made = plan_network(recipe, dense, images)
    _show(recipe.name, dense, made, html)


def _checked_shape(classes: int, size: int, channels: int) -> tuple[int, int, int]:
    """Return classes, size and channels of the images that a model is planned for, if they can be made."""
    if (values := channels * size**2) > MOST_VALUES:
        raise ValueError(
            f"--size {size} with --channels {channels} makes images of {values:,} values; expected at most "
            f"{MOST_VALUES:,}"
        )
    return classes, size, channels


def _recipe_of_model(model: str, given: dict[str, Any], changes: Sequence[str]) -> Recipe:
    """Return a recipe of that model, low-rank unless another scheme is given."""
    from factorized.experiments.recipes.find import change_table, check_recipe, merge

    table = {"name": model, "model": {"name": model}, "factorize": {"scheme": "low_rank"}}
    # options last: a scheme that is set drops the fields of another one, and must not drop what was asked for
    return check_recipe(merge(change_table(table, changes), {"factorize": given}), f"--model {model}")


def _named_recipe(name: str, given: dict[str, Any], changes: Sequence[str]) -> AnyRecipe:
    """Return the recipe of that name with the options that were given in place of its own."""
    from factorized.experiments.recipes.find import check_any_recipe, load_any_recipe, merge
    from factorized.experiments.recipes.recipe import BUDGETS

    if name in MODELS:
        raise ValueError(
            f"{name} is a model, not a recipe; plan it by --model {name}, with a budget such as --ratio 0.1"
        )
    read = load_any_recipe(name, changes)
    if read.factorize.scheme == "none" and not given.keys().isdisjoint(BUDGETS):
        given = {"scheme": "low_rank", **given}  # what would this budget do to the dense network?
    return check_any_recipe(merge(read.to_dict(), {"factorize": given}), name) if given else read


def _show(name: str, dense: nn.Module, made: Plan | None, html: Path | None) -> None:
    """Print a plan, and draw it on the page ``html`` if there is one."""
    from factorized.files.atomic import write_text
    from factorized.nn.running import count_parameters

    if made is None and html is not None:
        raise ValueError(f"{name} trains a dense network: there is no plan to draw; drop --html")
    if made is None:
        count = count_parameters(dense)
        say(f"{name} trains a dense network of {count:,} parameters; a budget, such as --ratio 0.1, would factorize it")
        return
    say(str(made))
    if html is not None:
        with writing_to(html, "name another place by --html"):
            write_text(html, made.to_html())
        say(f"written to {html}")


def _images_of(recipe: Recipe, data: str | None) -> tuple[Recipe, Images]:
    """Return the recipe and its images, or noise of the same shape where that is known: plans need only the shape."""
    from factorized.experiments.cli.images import load_data
    from factorized.experiments.data.stand_in import known_shape

    shape = known_shape(recipe.data.name) if data is None else None
    return load_data(recipe, data) if shape is None else _without_data(recipe, shape)


def _without_data(recipe: Recipe, shape: tuple[int, int, int]) -> tuple[Recipe, Images]:
    from factorized.experiments.data.stand_in import stand_in

    return recipe, stand_in(recipe.data.name, *shape)


def _weights_if_needed(recipe: Recipe) -> torch.device:
    """Return the device to build the model on: one without memory, unless ranks depend on the weights.

    Somebody else's function may look at numbers it made, and weights in a folder can only be read into memory.
    """
    import torch

    without = recipe.model.name in MODELS and not recipe.factorize.depends_on_weights
    return torch.device("meta" if without else "cpu")
