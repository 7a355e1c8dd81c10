"""Runs that take a second: a part of the digits, the smallest residual network, few and large batches."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from factorized.experiments.data.images import Images
from factorized.experiments.data.load import load_images
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.state import RunState, load_state
from factorized.files.checksum import sealed

NAME = "digits/resnet8-lowrank-0.1-si-fd"
STEPS = 4  # in an epoch
TIMES = ("seconds", "images_per_second")  # what differs from run to run


@cache
def digits(train: int = 512, test: int = 100) -> Images:
    """The first of the digits."""
    images = load_images("digits")
    x_train, y_train, x_test, y_test = images.x_train, images.y_train, images.x_test, images.y_test
    return replace(images, x_train=x_train[:train], y_train=y_train[:train], x_test=x_test[:test], y_test=y_test[:test])


def recipe(*changes: str, name: str = NAME) -> Recipe:
    """Two epochs of four steps, with what ``changes`` says."""
    return load_recipe(name, ["schedule.epochs=2", "run.batch=128", *changes])


class Signals(Reporter):
    """Sends signals to its own process at one step, or at the end of one epoch (``step=None``)."""

    def __init__(self, *numbers: int, epoch: int, step: int | None) -> None:
        super().__init__(quiet=True)
        self.numbers, self.at = numbers, (epoch, step)

    def step(self, epoch: int, step: int, loss_sum: Tensor, images_per_second: float) -> None:
        self._send(epoch, step)

    def epoch(self, row: dict[str, Any]) -> None:
        self._send(row["epoch"] - 1, None)

    def _send(self, epoch: int, step: int | None) -> None:
        if (epoch, step) == self.at:
            for number in self.numbers:
                os.kill(os.getpid(), number)


def metrics(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what a clock measured."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in history]


def state_of(folder: Path, seed: int = 0) -> RunState:
    return load_state(folder / f"seed-{seed}")


def change_result(run: Path, **fields: Any) -> None:
    """Change fields of a run's result, as one who knows how its checksum is made."""
    path = run / "result.json"
    result = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps(sealed({key: value for key, value in result.items() if key != "checksum"})))


def assert_same_run(actual: Path, expected: Path, seed: int = 0) -> None:
    """Both runs have ended, with the same weights, momentum and metrics to the last bit."""
    left, right = state_of(actual, seed), state_of(expected, seed)
    assert (left.epoch, left.step) == (right.epoch, right.step) == (right.recipe["schedule"]["epochs"], 0)
    for ours, theirs in ((left.network, right.network), (left.momentum, right.momentum), (left.counts, right.counts)):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert len(left.network) > 10
    assert metrics(left.history) == metrics(right.history)
