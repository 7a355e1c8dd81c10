"""Estimates come from the nearest past runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.shorten import shorten
from factorized.experiments.reproduce.estimate import estimate, in_time
from factorized.experiments.reproduce.runs import Run

HERE, THERE = "NVIDIA H200", "a laptop"


def past(name: str, seconds: float, device: str = HERE, **more: Any) -> Run:
    """Return a whole run of a recipe that took so many seconds."""
    recipe = load_any_recipe(name).to_dict()
    text = {"score": "bleu", "scores": {"bleu": 1.0}} if "task" in recipe else {}
    result = {"recipe": recipe, "seconds": seconds, "machine": {"device": device}, "data": recipe["data"], **text}
    return Run(Path("seed-0.json"), {**result, **more})


RUNS = [
    past("cifar10/resnet32x2", 400),
    past("cifar10/resnet32x2-lowrank-0.1", 300),
    past("cifar10/resnet32x2-lowrank-0.1", 500),
    past("cifar10/resnet32x2-lowrank-0.1", 9000, note="three runs shared the GPU"),
    past("cifar10/resnet32x2-lowrank-0.05", 200),
    past("cifar10/vgg19", 50, device=THERE),
    past("translation/numbers", 60),
    past("squad/bert-small", 30),
]


@pytest.mark.parametrize(
    ("name", "seconds", "basis"),
    [
        ("cifar10/resnet32x2-lowrank-0.1", 400, "this recipe, n = 2"),
        ("cifar10/resnet32x2-lowrank-0.02-si", 300, "resnet32x2, low_rank, n = 3"),
        ("cifar10/vgg19", 50, "this recipe, n = 1"),
        ("cifar10/vgg19-lowrank-0.1", 50, "vgg19, n = 1"),
        ("cifar100/resnet32x2", 350, "resnet32x2 on other data, n = 4"),
        ("tiny-imagenet/resnet32x2", 8 * 350, "resnet32x2 on other data, 8× pixels, n = 4"),
        ("translation/numbers-fd-ov", 60, "translation 64x2, none, n = 1"),
    ],
)
def test_the_nearest_past_runs_say_how_long_a_run_takes(name: str, seconds: float, basis: str) -> None:
    found = estimate(load_any_recipe(name), RUNS, HERE)
    assert found is not None
    assert (found.seconds, found.basis) == (pytest.approx(seconds), basis)
    assert found.device == (THERE if "vgg" in name else HERE)


def test_a_run_that_took_turns_with_others_counts_with_its_share() -> None:
    machine = {"device": HERE, "runs_at_once": 3}
    runs = [past("cifar10/resnet20", seconds, machine=machine) for seconds in (240, 300, 360)]
    found = estimate(load_any_recipe("cifar10/resnet20"), runs, HERE)
    assert found is not None
    assert (found.seconds, found.basis) == (pytest.approx(100), "this recipe, n = 3 (shared)")
    alone = estimate(load_any_recipe("cifar10/resnet20"), [*runs, past("cifar10/resnet20", 80)], HERE)
    assert alone is not None
    assert (alone.seconds, alone.basis) == (pytest.approx(80), "this recipe, n = 1")


def test_a_shortened_run_takes_its_share_of_the_time() -> None:
    found = estimate(shorten(load_any_recipe("cifar10/resnet32x2"), 10), RUNS, HERE)
    assert found is not None
    assert found.seconds == pytest.approx(20)


@pytest.mark.parametrize("name", ["cifar10/wrn28-10", "translation/tatoeba", "squad/bert-large"])
def test_a_network_that_no_past_run_had_has_no_estimate(name: str) -> None:
    assert estimate(load_any_recipe(name), RUNS, HERE) is None


def test_runs_that_shared_their_device_count_where_there_are_no_others_and_are_marked() -> None:
    shared = [past("cifar10/vgg19", 100, note="shared")]
    found = estimate(load_any_recipe("cifar10/vgg19"), shared, HERE)
    assert found is not None
    assert (found.seconds, found.basis) == (pytest.approx(100), "this recipe, n = 1 (shared)")
    alone = estimate(load_any_recipe("cifar10/vgg19"), [*shared, past("cifar100/vgg19-lowrank-0.1", 40)], HERE)
    assert alone is not None
    assert (alone.seconds, alone.basis) == (pytest.approx(40), "vgg19 on other data, n = 1")


def test_durations_are_readable() -> None:
    assert [in_time(seconds) for seconds in (4, 99, 150, 5000, 9000)] == ["4 s", "99 s", "2 min", "83 min", "2.5 h"]
