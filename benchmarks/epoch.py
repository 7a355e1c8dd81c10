"""Time whole training epochs as ``factorized train`` runs them, and profile their kernels.

    python -m benchmarks.epoch --out benchmarks/results/epoch-h200.json

``factorized bench training`` times single steps on two batches; an epoch also shuffles and reads all images, which are
noise of CIFAR's size. Times are medians of epochs, interleaved over the recipes, in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from factorized.experiments.data.stand_in import stand_in
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.record import describe_machine
from factorized.experiments.training.train import Trainer

RECIPES = ("cifar10/resnet32x2", "cifar10/resnet32x2-lowrank-0.1-si-fd", "cifar10/resnet32", "cifar10/resnet32-full-fd")


def seconds_of_epoch(trainer: Trainer, epoch: int) -> float:
    """Train one epoch and return the seconds until the device has finished it."""
    trainer.source.start(0, epoch)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(trainer.source.steps):
        trainer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def profile(trainer: Trainer) -> str:
    """Return a table of the kernels of five steps."""
    trainer.source.start(0, 0)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(5):
            trainer.step()
        torch.cuda.synchronize()
    return profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90)


def main() -> None:
    """Parse the command line, time every recipe and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--set", action="append", default=[], help="section.field=value, for every recipe")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="write the kernels of a few steps to this folder")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    images, trainers, rows = stand_in("noise", 10, 32, 3, arguments.images), {}, {}
    for name in arguments.recipes:
        began = time.perf_counter()
        torch._dynamo.reset()
        trainers[name] = Trainer(load_recipe(name, arguments.set), images, Processes(torch.device("cuda")), 0)
        rows[name] = {"recipe": name, "start_seconds": round(time.perf_counter() - began, 1)}
        print(rows[name], flush=True)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for epoch in range(arguments.epochs + 1):
        for name, trainer in trainers.items():
            seconds = seconds_of_epoch(trainer, epoch)
            if epoch:
                times[name].append(seconds)
    for name, trainer in trainers.items():
        seconds = statistics.median(times[name])
        rows[name] |= {"seconds": round(seconds, 4), "ms_per_step": round(1e3 * seconds / trainer.source.steps, 3)}
        print(rows[name], flush=True)
        if arguments.profile is not None:
            arguments.profile.mkdir(parents=True, exist_ok=True)
            (arguments.profile / f"{name.replace('/', '-')}.txt").write_text(profile(trainer))
    report = {"machine": describe_machine(torch.device("cuda")), "batch": 128, "epochs": arguments.epochs}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**report, "rows": list(rows.values())}, indent=1))


if __name__ == "__main__":
    main()
