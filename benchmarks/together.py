"""Time epochs of runs that take turns on one device, against those of a run alone.

    python -m benchmarks.together --out benchmarks/results/together-h200.json

Runs are trained as ``factorized train --at-once`` trains them, with their evaluation, diagnosis and checkpoint after
every epoch. Images are random. An epoch's time is the median of all but the first two, of all runs.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.script import parser_of, write
from factorized.experiments.data.images import Images
from factorized.experiments.data.stand_in import stand_in
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.train import train

WARM_UP = 2  # epochs: the first has the compiler in it, and the capture of the evaluation


def epoch_seconds(recipe: Recipe, images: Images, device: torch.device, runs: int) -> float:
    """Return the median time of an epoch of ``runs`` runs at once, which is the time in which each of them has one."""
    with tempfile.TemporaryDirectory() as folder:
        results = train(recipe, images, Path(folder), seeds=range(runs), at_once=runs, device=device)
    return statistics.median(row["seconds"] for result in results for row in result["history"][WARM_UP:])


def main(given: Sequence[str] | None = None) -> None:
    """Parse the command line, time every number of runs and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("recipe", nargs="?", default="cifar10/resnet32")
    parser.add_argument("--set", action="append", default=[], help="section.field=value")
    parser.add_argument(
        "--runs", type=int, nargs="+", default=[1, 3], help="how many at once; the first is compared to"
    )
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--device", type=torch.device, default="cuda")
    arguments = parser.parse_args(given)
    if arguments.epochs <= WARM_UP:
        parser.error(f"--epochs must be at least {WARM_UP + 1}: the first {WARM_UP} are not counted")
    recipe = load_recipe(arguments.recipe, [*arguments.set, f"schedule.epochs={arguments.epochs}"])
    noise, tests = stand_in("noise", 10, 32, 3, arguments.images), arguments.images // 5  # as CIFAR has
    images = replace(noise, x_test=noise.x_test[:tests], y_test=noise.y_test[:tests])
    rows: list[dict[str, float]] = []
    for runs in arguments.runs:
        seconds = epoch_seconds(recipe, images, arguments.device, runs)
        first = rows[0] if rows else {"runs": runs, "seconds_per_epoch": seconds}
        gain = runs / first["runs"] * first["seconds_per_epoch"] / seconds
        rows.append({"runs": runs, "seconds_per_epoch": round(seconds, 3), "gain": round(gain, 2)})
        print(rows[-1], flush=True)
    write(arguments.out, arguments.device, rows, recipe=recipe.name, epochs=arguments.epochs)


if __name__ == "__main__":
    main()
