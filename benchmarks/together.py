"""Time training runs that take turns to issue steps to one device, against one run after another.

    python -m benchmarks.together --out benchmarks/results/together-h200.json

Every run has its own network, optimizer, decay and captured step, made in its own turn as ``factorized train
--at-once`` makes them; runs of a recipe share the compiled code. Images are random. Times are medians of interleaved
rounds. The results were measured with turns of one step; ``threads`` in them is a thread for each run, as the script
had it at the commit that they name.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.script import parser_of, write
from factorized.experiments.data.images import Images
from factorized.experiments.data.stand_in import stand_in
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.trainer import Trainer
from factorized.experiments.training.turns import STEPS, Turn

RECIPES = ("cifar10/resnet32", "cifar10/resnet32-full-fd")
Row = dict[str, str | int | float]


class Run:
    """A training run and its turn on the device."""

    def __init__(self, recipe: Recipe, images: Images, device: torch.device, seed: int) -> None:
        self.device, self.turn = device, Turn(device)
        with self.turn:
            self.trainer = Trainer(recipe, images, Processes(device), seed)
            self.trainer.source.start(seed, 0)

    def train(self, steps: int) -> None:
        """Issue steps in one turn, without waiting for them."""
        with self.turn:
            for _ in range(steps):
                self.trainer.step()


def one_by_one(runs: Sequence[Run], steps: int) -> None:
    """Train one run after another."""
    for run in runs:
        run.train(steps)
        wait_for(run.device)


def in_turn(runs: Sequence[Run], steps: int) -> None:
    """Issue the steps of each run in turns."""
    for taken in range(0, steps, STEPS):
        for run in runs:
            run.train(min(STEPS, steps - taken))


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what was issued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


WAYS: tuple[Callable[[Sequence[Run], int], None], ...] = (one_by_one, in_turn)


def measure(runs: Sequence[Run], counts: Sequence[int], steps: int, rounds: int) -> list[Row]:
    """Return a row for each number of runs: steps a second of all of them, by every way."""
    device = runs[0].device
    times: dict[tuple[int, str], list[float]] = {(count, way.__name__): [] for count in counts for way in WAYS}
    issuing: dict[int, list[float]] = {count: [] for count in counts}
    for round_ in range(rounds + 1):
        for count in counts:
            for way in WAYS:
                wait_for(device)
                began = time.perf_counter()
                way(runs[:count], steps)
                issued = time.perf_counter() - began
                wait_for(device)
                if round_:  # the first one warms up
                    times[count, way.__name__].append(time.perf_counter() - began)
                    if way is in_turn:
                        issuing[count].append(issued)
    rows: list[Row] = []
    for count in counts:
        seconds = {way.__name__: statistics.median(times[count, way.__name__]) for way in WAYS}
        rows.append(
            {"runs": count, "ms_to_issue_a_step": round(1e3 * statistics.median(issuing[count]) / (count * steps), 3)}
            | {f"{name}_steps_per_second": round(count * steps / taken, 2) for name, taken in seconds.items()}
            | {"in_turn_gain": round(seconds["one_by_one"] / seconds["in_turn"], 3)}
        )
    return rows


def main(given: Sequence[str] | None = None) -> None:
    """Parse the command line, time every recipe and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--set", action="append", default=[], help="section.field=value, for every recipe")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 3, 4, 6], help="how many at once")
    parser.add_argument("--images", type=int, default=12_800)
    parser.add_argument("--steps", type=int, default=3 * STEPS, help="of each run in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", type=torch.device, default="cuda")
    arguments = parser.parse_args(given)
    images, rows = stand_in("noise", 10, 32, 3, arguments.images).to(arguments.device), []
    for name in arguments.recipes:
        began = time.perf_counter()
        torch.compiler.reset()
        recipe = load_recipe(name, arguments.set)
        runs = [Run(recipe, images, arguments.device, seed) for seed in range(max(arguments.runs))]
        started = round(time.perf_counter() - began, 1)
        print(f"{name}: {len(runs)} runs made in {started} s", flush=True)
        for row in measure(runs, arguments.runs, arguments.steps, arguments.rounds):
            rows.append({"recipe": name, **row})
            print(rows[-1], flush=True)
    write(arguments.out, arguments.device, rows, steps=arguments.steps, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
