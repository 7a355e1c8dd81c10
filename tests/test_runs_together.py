"""``benchmarks.together`` in small, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import together
from factorized.experiments.data.stand_in import stand_in
from factorized.experiments.recipes.find import load_recipe

SMALL = ["run.batch=2", "schedule.epochs=1", "schedule.milestones=[]"]


def test_every_way_takes_the_same_steps_of_every_run() -> None:
    recipe = load_recipe("cifar10/resnet20", SMALL)
    images = stand_in("noise", 10, 32, 3, 16)
    taken = []
    for way in together.WAYS:
        runs = [together.Run(recipe, images, torch.device("cpu"), seed) for seed in range(2)]
        way(runs, 2)
        taken.append([int(run.trainer.step.position) for run in runs])
    assert taken == [[2, 2]] * 2


def test_the_runs_are_timed_together_and_one_by_one(tmp_path: Path) -> None:
    out = tmp_path / "made" / "together.json"
    changes = [word for change in SMALL for word in ("--set", change)]
    small = ["--images", "16", "--steps", "1", "--rounds", "1", "--device", "cpu", "--runs", "1", "2"]
    together.main(["cifar10/resnet20", "cifar10/resnet20-full-fd", *changes, *small, "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["machine"]["torch"] == torch.__version__
    rows = report["rows"]
    recipes = ["cifar10/resnet20", "cifar10/resnet20-full-fd"]
    assert [(row["recipe"], row["runs"]) for row in rows] == [(name, count) for name in recipes for count in (1, 2)]
    for row in rows:
        speeds = [row[f"{way.__name__}_steps_per_second"] for way in together.WAYS]
        assert min(speeds) > 0
        assert abs(row["in_turn_gain"] - speeds[1] / speeds[0]) < 0.01 * row["in_turn_gain"] + 0.001
