"""Every file that we write and read, damaged: it is refused, or what is read is identical, and never different.

Nobody here reads `metrics.jsonl`, TensorBoard's events, `report.html`, pages of plans, ONNX and torch.export files:
they are for others. Composed and lowered files are read once, by the command that writes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import factorized as fz
from factorized.experiments.cli.main import main
from factorized.experiments.data.load import load_images
from factorized.experiments.data.prepared import read_prepared
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.training import export
from factorized.experiments.training.network import build_network
from factorized.experiments.training.norms import norms_table
from factorized.experiments.training.result import read_result
from factorized.experiments.training.state import load_state
from factorized.experiments.training.trained import load_trained
from tests.hostile.damage import DAMAGES, damage, replace
from tests.hostile.place import DENSE, LOW, NORMED, SAVED, dense

SEED = 13
FEW, MANY = 2, 40  # seeds of each damage


def read_saved(folder: Path) -> Any:
    return fz.load(folder / SAVED, dense()).state_dict()


def read_run(run: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        recipe, result, network = load_trained(folder / run)
        return recipe.to_dict(), result, network.state_dict()

    return read


def read_data(folder: Path) -> Any:
    images = read_prepared(folder / "data/small.safetensors")
    return {key: value for key, value in vars(images).items() if key != "checksum"}


def read_norms(folder: Path) -> Any:
    recipe = load_recipe("low.toml", ["decay.kind=normalized", f"decay.norms={NORMED}"])
    images = load_images("digits")
    network = build_network(load_recipe("low.toml"), images, 0)
    return norms_table(recipe, network, len(images.y_train) // recipe.run.batch, 0)


@dataclass(frozen=True)
class Format:
    """A file that we write, and all that we read from it."""

    name: str
    file: str  # as a pattern
    read: Callable[[Path], Any]

    def __str__(self) -> str:
        return self.name


FORMATS = (
    Format("checkpoint of a run", f"{LOW}/checkpoint.pt", lambda folder: vars(load_state(folder / LOW))),
    Format("result of a run", f"{LOW}/result.json", lambda folder: read_result(folder / LOW)),
    Format("plan of a trained network", f"{LOW}/model/plan.json", read_run(LOW)),
    Format("weights of a trained network", f"{LOW}/model/weights-*.safetensors", read_run(LOW)),
    Format("weights of a dense network", f"{DENSE}/model/dense.safetensors", read_run(DENSE)),
    Format("norms of a run", f"{NORMED}/norms.safetensors", read_norms),
    Format("prepared data", "data/small.safetensors", read_data),
    Format("plan of fz.save", f"{SAVED}/plan.json", read_saved),
    Format("weights of fz.save", f"{SAVED}/weights-*.safetensors", read_saved),
)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_damaged_file_is_refused_or_read_the_same(form: Format, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(form, made, range(FEW * len(DAMAGES)), monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_file_that_is_damaged_in_many_ways_is_refused_or_read_the_same(
    form: Format, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(form, made, range(FEW * len(DAMAGES), MANY * len(DAMAGES)), monkeypatch)


def check(form: Format, made: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage the file with every seed: most damage is refused in one line that names the file, and none is misread."""
    monkeypatch.chdir(made)
    path = next(made.glob(form.file))
    whole, expected = path.read_bytes(), form.read(made)
    wrong, refused = [], 0
    try:
        for seed in seeds:
            done = damage(path, SEED * 10_000 + seed)
            try:
                if not same(form.read(made), expected):
                    wrong.append(f"{done}: read differently")
            except ValueError as refusal:
                refused += 1
                if "\n" in str(refusal).strip() or path.name not in str(refusal):
                    wrong.append(f"{done}: refused in several lines, or without a name: {refusal}"[:200])
            except Exception as raw:
                wrong.append(f"{done}: {type(raw).__name__}: {raw}"[:200])
            replace(path, whole)
    finally:
        replace(path, whole)
    assert wrong == [], f"{len(wrong)} of {len(seeds)}"
    assert refused > len(seeds) // 2


def same(left: Any, right: Any) -> bool:
    """Return whether two things that were read are equal, tensors bit for bit."""
    if isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(right, dict):
        return isinstance(left, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in right)
    if isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@pytest.mark.nightly
@pytest.mark.parametrize("lower", [False, True])
def test_compose_keeps_no_file_that_was_damaged_as_it_was_written(
    lower: bool, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    words = ["compose", LOW, *(["--lower"] if lower else []), "--out"]
    assert main([*words, str(tmp_path / "whole.safetensors")]) == 0
    expected, write = load_file(tmp_path / "whole.safetensors"), export.write_network
    draw, wrong = random.Random(SEED), []
    for number in range(2 * len(DAMAGES)):
        said: list[str] = []
        seed = draw.randrange(10**6) * len(DAMAGES) + number % len(DAMAGES)

        def spoiled(*arguments: Any, seed: int = seed, said: list[str] = said) -> None:
            write(*arguments)
            said.append(damage(arguments[2], seed))

        monkeypatch.setattr(export, "write_network", spoiled)
        target = tmp_path / f"{number}.safetensors"
        code = main([*words, str(target)])
        if code not in (1, 2) and not (target.is_file() and same(load_file(target), expected)):
            wrong.append(f"{said}: exit code {code}, kept and different")
        if code and target.exists():
            wrong.append(f"{said}: exit code {code}, and the file is there")
    assert wrong == []
