"""Files of a run with bytes changed, cut off or lost: refused, or read as what was written."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.training.norms import norms_table
from factorized.experiments.training.state import FILE, load_state
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import load_trained
from tests.experiments.training.small import digits, recipe

FEW, MANY = 60, 3000


def read_checkpoint(run: Path) -> dict[str, Any]:
    return dict(load_state(run))


def read_network(run: Path) -> dict[str, Any]:
    return dict(load_trained(run)[2].state_dict())


def read_norms(run: Path) -> dict[str, Any]:
    changed = recipe("decay.kind=normalized", f"decay.norms='{run}'")
    network = load_trained(run)[2]
    norms = norms_table(changed, network, 8, seed=0)
    assert norms is not None
    return {"norms": norms}


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "checkpoint": read_checkpoint,
    "dense network": read_network,
    "factorized network": read_network,
    "norms": read_norms,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each file, the one to be damaged in a run of its own."""
    folder = tmp_path_factory.mktemp("runs")
    train(recipe(name="digits/resnet8"), digits(), folder / "dense", device="cpu")
    train(recipe("decay.record_norms=true"), digits(), folder / "products", device="cpu")
    dense, products = folder / "dense/seed-0", folder / "products/seed-0"
    return {
        "checkpoint": dense / FILE,
        "dense network": dense / "model/dense.safetensors",
        "factorized network": next((products / "model").glob("*.safetensors")),
        "norms": products / "norms.safetensors",
    }


def damaged(good: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield the bytes changed in one of five ways, more often where headers are."""
    chance = random.Random(seed)
    for _ in range(count):
        bad = bytearray(good)
        ends = (chance.randrange(min(2000, len(good))), -1 - chance.randrange(min(4000, len(good))))
        place = chance.choice((*ends, chance.randrange(len(good)))) % len(good)
        way = chance.randrange(5)
        if way == 0:
            bad[place] ^= 1 << chance.randrange(8)
        elif way == 1:
            other = chance.randrange(len(good))
            bad[place], bad[other] = bad[place] ^ 0xFF, bad[other] ^ 0x55
        elif way == 2:
            del bad[place:]
        elif way == 3:
            del bad[place : place + chance.randrange(1, 64)]
        else:
            bad[place : place + 16] = chance.randbytes(16)
        yield bytes(bad)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def assert_refused_or_identical(path: Path, what: str, count: int, seed: int) -> None:
    run = path.parents[1] if path.parent.name == "model" else path.parent
    good, read = path.read_bytes(), READERS[what]
    expected = read(run)
    refused = []
    for number, bad in enumerate(damaged(good, count, seed)):
        path.write_bytes(bad)
        try:
            found = read(run)
        except ValueError as error:
            refused.append(str(error))
        else:
            assert same(found, expected), f"damage {number} of seed {seed} was read as something else"
    path.write_bytes(good)
    assert len(refused) > count // 2
    assert [message for message in refused if str(path) not in message or "\n" in message] == []


@pytest.mark.parametrize("what", READERS)
def test_a_damaged_file_is_refused_or_read_as_what_was_written(
    runs: dict[str, Path], tmp_path: Path, what: str
) -> None:
    assert_refused_or_identical(copy_of(runs[what], tmp_path), what, FEW, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("what", READERS)
def test_none_of_many_damaged_files_is_read_as_something_else(
    runs: dict[str, Path], tmp_path: Path, what: str, seed: int
) -> None:
    assert_refused_or_identical(copy_of(runs[what], tmp_path), what, MANY, seed)


def copy_of(path: Path, folder: Path) -> Path:
    run = path.parents[1] if path.parent.name == "model" else path.parent
    return shutil.copytree(run, folder / "run") / path.relative_to(run)
