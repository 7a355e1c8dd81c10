"""``factorized train``: train a recipe, once for each seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from factorized.experiments.cli.arguments import (
    LARGEST_SEED,
    MOST_SEEDS,
    Changes,
    Data,
    Device,
    Quiet,
    RecipeName,
    examples,
)
from factorized.experiments.cli.console import console, plain_table, say
from factorized.experiments.cli.recipes import paper_figure

if TYPE_CHECKING:
    from factorized.experiments.recipes.text import AnyRecipe

EXAMPLES = examples(
    "factorized train digits/resnet8-lowrank-0.1-si-fd",
    "factorized train cifar10/resnet32x2 --data DIR --seeds 3",
    "factorized train cifar10/resnet32 --data DIR --seeds 3 --at-once 3",
    "factorized train cifar10/resnet32x2 --data cifar.npz --set schedule.epochs=30 --set optimizer.lr=0.05",
    "factorized train cifar10/resnet32x2 --data DIR --resume",
    "torchrun --nproc-per-node 4 -m factorized train tiny-imagenet/resnet32x2 --data DIR",
)


def train(
    name: RecipeName,
    data: Data = None,
    changes: Changes = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=MOST_SEEDS, help="Train seeds 0 to N-1.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Train this seed; by default 0.")] = None,
    at_once: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_SEEDS, help="Number of seeds to train at once; a small network uses only part of a GPU."
        ),
    ] = 1,
    out: Annotated[Path, typer.Option(help="Runs are written to OUT/NAME/seed-SEED.")] = Path("out"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint of these runs.")] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Continue a run if there is one, else start it.")
    ] = False,
    allow_other_devices: Annotated[
        bool,
        typer.Option(
            "--allow-other-devices",
            help="Resume even if the number of processes or the kind of device differs; this changes the result.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete a run that is there, and start over.")] = False,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train a recipe with one or several seeds; each run is written to OUT/NAME/seed-SEED."""
    if seeds is not None and seed is not None:
        raise ValueError(f"give --seeds {seeds} for seeds 0 to {seeds - 1}, or --seed {seed} for one, not both")
    if seed is not None and seed > LARGEST_SEED:
        raise ValueError(f"--seed must be at most {LARGEST_SEED}, the largest that torch takes, got {seed}")
    ways = [
        option
        for option, given in (("--resume", resume), ("--auto-resume", auto_resume), ("--overwrite", overwrite))
        if given
    ]
    if len(ways) > 1:
        raise ValueError(
            f"got {' and '.join(ways)}: --resume continues a run, --auto-resume also starts one, and --overwrite "
            "starts it over; give one of them"
        )
    chosen = tuple(range(seeds)) if seeds is not None else (seed or 0,)

    from factorized.experiments.cli.device import pick_device
    from factorized.experiments.cli.images import load_data
    from factorized.experiments.cli.text import train_recipe
    from factorized.experiments.recipes.find import load_any_recipe
    from factorized.experiments.recipes.text import TextRecipe
    from factorized.experiments.training.progress import Reporter
    from factorized.experiments.training.train import train as train_seeds

    recipe = load_any_recipe(name, changes or ())
    where = pick_device(device)
    folder = out / recipe.name
    how_to_begin: bool | Literal["auto"] = "auto" if auto_resume else resume
    if isinstance(recipe, TextRecipe):
        if at_once > 1:
            raise ValueError(f"--at-once {at_once} is for recipes of images; {recipe.name} is on text, leave it out")
        results = train_recipe(
            recipe,
            data,
            folder,
            seeds=chosen,
            device=where,
            resume=how_to_begin,
            overwrite=overwrite,
            allow_other_devices=allow_other_devices,
            quiet=quiet,
        )
    else:
        recipe, images = load_data(recipe, data, quiet=quiet)
        results = train_seeds(
            recipe,
            images,
            folder,
            seeds=chosen,
            at_once=at_once,
            device=where,
            resume=how_to_begin,
            overwrite=overwrite,
            allow_other_devices=allow_other_devices,
            reporter=Reporter(console(quiet=quiet), quiet=quiet),
        )
    _report(recipe, results, folder)


def _report(recipe: AnyRecipe, results: Sequence[dict[str, Any]], folder: Path) -> None:
    from factorized.experiments.reproduce.runs import Run
    from factorized.experiments.reproduce.summary import Summary

    runs = [Run(folder / f"seed-{result['seed']}", result) for result in results]
    of_images, metric = "accuracy" in results[0], runs[0].metric
    numbers = ("seed", "test accuracy, %" if of_images else metric, "seconds")
    table = plain_table(*numbers, "run", numbers=numbers)
    for run in runs:
        table.add_row(str(run.seed), f"{run.score:.2f}", f"{run.result['seconds']:.1f}", str(run.path))
    console().print(table)
    mean = Summary.of([run.score for run in runs])
    told = f"{mean} %" if of_images else f"{metric} {mean}"
    where, figure = paper_figure(recipe.paper)
    beside = f"; paper, {where}: {figure} %" if figure else ""
    say(f"{recipe.name}: {told} (n = {mean.n}), {results[0]['parameters']:,} parameters{beside}")
