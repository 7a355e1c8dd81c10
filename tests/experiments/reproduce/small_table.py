"""A table that is trained in seconds: the embedded digits, four epochs of five steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from factorized.experiments.recipes.find import table_recipes
from factorized.experiments.reproduce.engine import Engine
from factorized.experiments.reproduce.job import Job
from factorized.experiments.reproduce.planned import Planner, in_waves
from factorized.experiments.reproduce.runs import Run, read_runs
from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.state import load_state

TABLE = """
recipe = { name = "{grid}-{column}", title = "{grid}, {column}" }
dense = { name = "{grid}", title = "{grid}, dense" }
metric = "accuracy"
table = 1

[settings]
model.name = "resnet8"
data = { name = "digits", crop_padding = 1, flip = false }
schedule = { epochs = 4, milestones = [2] }
run = { batch = 256, diagnose = false }

[columns]
dense.dense = true
fd.settings = { factorize = { scheme = "low_rank", ratio = 0.1 }, decay.kind = "frobenius" }

[rows]
all = {}

[[grid]]
name = "small/digits"
title = "Digits"
columns = ["dense", "fd"]
rows = { all = "90.5±0.25 *" }
"""
# as good as endless, and without a checkpoint unless it is stopped
ENDLESS = TABLE.replace("epochs = 4, milestones = [2]", "epochs = 5000").replace(
    "run = { ", "run = { checkpoint_every = 5000, "
)


def wait_for_epochs(folder: Path, runs: int) -> None:
    """Wait until so many runs have finished an epoch."""
    for _ in range(2000):
        if sum(path.stat().st_size > 0 for path in folder.rglob("metrics.jsonl")) >= runs:
            return
        time.sleep(0.1)
    raise AssertionError(f"{runs} runs did not begin in {folder}")


def check_that_a_signal_lets_runs_save_themselves(engine: Engine, folder: Path) -> None:
    """Train the table without an end, two runs at a time, stop it by a signal when both train, and check that they
    left checkpoints and that no other one was begun.
    """
    every = [one for job in jobs(folder, seeds=2, text=ENDLESS) for one in job.by_seed()]

    def stop_when_both_train() -> None:
        wait_for_epochs(folder / "out", runs=2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_both_train, daemon=True).start()
    with pytest.raises(Interrupted, match="SIGTERM"):
        list(engine.run(every))
    begun = [path.parent for path in (folder / "out").rglob("metrics.jsonl")]
    assert len(begun) == 2
    assert all(load_state(run).epoch > 0 for run in begun)


def write_table(folder: Path, text: str = TABLE) -> Path:
    """Write the table into ``folder`` and return its path."""
    path = folder / "digits.toml"
    path.write_text(text)
    return path


def runs_in(*places: Path) -> list[Run]:
    """Return the finished runs in folders, where those are there."""
    return read_runs([place for place in places if place.is_dir()]).runs


def planner(folder: Path, *, length: int | None = None, text: str = TABLE, data: str | None = None) -> Planner:
    """Return a planner for the table, with runs in ``folder/out``."""
    recipes = {recipe.name: recipe for recipe in table_recipes(str(write_table(folder, text)))}
    return Planner(folder / "out", data, runs_in(folder / "out", folder / "results"), length, recipes)


def jobs(folder: Path, seeds: int = 1, *, length: int | None = None, text: str = TABLE) -> list[Job]:
    """Return the jobs of the table's first wave."""
    planned = planner(folder, length=length, text=text)
    runs = [planned.plan(recipe, seed) for recipe in planned.own.values() for seed in range(seeds)]
    waves = in_waves(runs, None)
    return waves[0] if waves else []
