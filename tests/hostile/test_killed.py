"""SIGKILL at any moment: a run goes on to the very result, a saved model is the old one or the new one."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import factorized as fz
from tests.experiments.data.small_sets import small_images, write_npz
from tests.experiments.training.small import TIMES, assert_same_run
from tests.hostile import killed

KILLS = 30
SEED = 13
DIFFERENT = (*TIMES, "files", "checksum")  # the weights have a new name each time
PROCESSES = multiprocessing.get_context("forkserver")  # forks a process that has imported everything
PROCESSES.set_forkserver_preload(
    ["tests.hostile.killed", "factorized.experiments.training.train", "torch.utils.tensorboard"]
)


def start(job: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    process = PROCESSES.Process(target=job, args=arguments)
    process.start()
    return process


def was_killed(process: ForkServerProcess, moment: float) -> bool:
    """Kill a process after so many seconds; return whether it was still at work, else it has ended well."""
    process.join(moment)
    process.kill()
    process.join()
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


def comparable(path: Path) -> Any:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if key not in DIFFERENT}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return clean(json.loads(path.read_text()))


def names(folder: Path) -> list[str]:
    """Return the files of a folder; those that get a new name every time by what they are."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    plain = (name.partition("weights-")[0] + "weights" if "weights-" in name else name for name in found)
    return sorted(name for name in plain if "events.out.tfevents" not in name)  # one for every start


@pytest.mark.nightly
def test_a_run_that_is_killed_thirty_times_ends_as_one_that_was_not(tmp_path: Path) -> None:
    write_npz(tmp_path / "few.npz", small_images(train=256, test=50, side=8, channels=1, classes=10))
    process = start(killed.train, tmp_path / "whole")
    assert not was_killed(process, 600)
    draw, kills, ended = random.Random(SEED), 0, 0
    folder = tmp_path / "killed-0"
    while kills < KILLS or ended == 0:
        patience = draw.uniform(0, 4) if kills < KILLS else 600
        if was_killed(start(killed.train, folder), patience):
            kills += 1
            continue
        assert_same(folder, tmp_path / "whole")
        ended += 1
        folder = tmp_path / f"killed-{ended}"
    assert kills == KILLS


def assert_same(actual: Path, expected: Path) -> None:
    run = next(expected.glob("**/result.json")).parent.relative_to(expected)
    assert_same_run((actual / run).parent, (expected / run).parent)
    assert comparable(actual / run / "result.json") == comparable(expected / run / "result.json")
    assert names(actual) == names(expected)


@pytest.mark.nightly
def test_a_folder_whose_saves_are_killed_loads_and_the_next_save_cleans_it(tmp_path: Path) -> None:
    folder, draw = tmp_path / "saved", random.Random(SEED)
    fz.save(killed.filled(0), folder)
    at_least = 0
    for _ in range(KILLS):
        assert was_killed(start(killed.save_again_and_again, folder, at_least + 1), draw.uniform(0, 0.6))
        found = torch.cat([p.detach().flatten() for p in fz.load(folder, killed.dense()).parameters()]).unique()
        assert len(found) == 1  # of one save, whole
        assert found.item() >= at_least
        at_least = int(found.item())
    assert at_least > KILLS  # most of them were killed at work
    fz.save(killed.filled(7), folder)
    assert names(folder) == ["plan.json", "weights"]
