"""Checkpoints that a run cannot have written, or that others wrote: refused by file and field."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.state import FILE, load_state, save_state
from factorized.experiments.training.train import train
from tests.experiments.training.small import Signals, digits, recipe, state_of


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in the middle of its second epoch."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(Interrupted):
        train(recipe(), digits(), folder, device="cpu", reporter=Signals(signal.SIGTERM, epoch=1, step=0))
    return folder


def test_resuming_with_other_processes_is_refused_unless_allowed_and_both_are_recorded(
    cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(cut, tmp_path / "run")
    state = state_of(tmp_path / "run")
    assert state.ran_on == ["1 process (cpu)"]
    state.ran_on = ["2 processes (cpu)"]
    save_state(state, tmp_path / "run" / "seed-0")
    with pytest.raises(ValueError, match=r"by 2 processes \(cpu\), and this is 1 process \(cpu\): .*--allow-other-dev"):
        train(recipe(), digits(), tmp_path / "run", device="cpu", resume=True)
    allowed = {"device": "cpu", "resume": True, "allow_other_devices": True, "reporter": Reporter()}
    [result] = train(recipe(), digits(), tmp_path / "run", **allowed)
    assert "continues with 1 process (cpu); it was trained by 2 processes (cpu) before" in capsys.readouterr().out
    assert result["ran_on"] == ["2 processes (cpu)", "1 process (cpu)"]
    [again] = train(recipe(), digits(), tmp_path / "run", device="cpu", resume=True)  # ended: nothing depends on it
    assert again["ran_on"] == result["ran_on"]


@pytest.mark.parametrize("damage", ["truncated", "a flipped byte", "text", "empty"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_trained(cut: Path, tmp_path: Path, damage: str) -> None:
    good = (cut / "seed-0" / FILE).read_bytes()
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 0xFF]) + good[middle + 1 :]
    bad = {"truncated": good[:middle], "a flipped byte": flipped, "text": b"hello", "empty": b""}[damage]
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / FILE).write_bytes(bad)
    with pytest.raises(ValueError, match=r"seed-0/checkpoint\.pt is damaged .*start this run over with --overwrite"):
        train(recipe(), digits(), tmp_path, device="cpu", resume=True)
    assert (tmp_path / "seed-0" / FILE).read_bytes() == bad


WRONG: dict[str, tuple[str, Any, str]] = {
    "epoch before the first": ("epoch", -5, "epoch: must be greater than or equal to 0, got -5"),
    "epoch after the last": ("epoch", 10**9, "epoch is 1000000000, and the run has 2"),
    "epoch as a word": ("epoch", "1", "epoch: must be a valid integer, got '1'"),
    "step after the last": ("step", 5, "step is 5, and at most 4 steps"),
    "step that was not taken": ("step", 3, r"counts\.position is 6, expected 7"),
    "no history": ("history", None, "history: must be a valid list, got None"),
    "short history": ("history", [], "history must have a row for each of 1 epochs, and has 0 rows"),
    "history of words": ("history", ["a"], r"history\.0: must be a valid dict"),
    "seconds that are none": ("seconds", float("nan"), "seconds: must be"),
    "no weights": ("network", {}, "network has no 'bn1.bias'"),
    "network that is none": ("network", None, "network: must be a valid dict"),
    "weights as a list": ("network", {"conv1.weight": [1.0]}, r"network\.conv1\.weight: must be an instance"),
    "no momentum": ("momentum", {}, "momentum has no 'bn1.bias'"),
    "no counts": ("counts", {}, "counts has no 'correct'"),
    "no random state": ("random", {}, "random has no state of cpu"),
    "a short random state": ("random", {"cpu": torch.zeros(3, dtype=torch.uint8)}, r"random\.cpu is not the state"),
    "a random state of zeros": ("random", {"cpu": torch.zeros(5056, dtype=torch.uint8)}, r"random\.cpu is not the"),
    "a short random state of one process": (
        "random",
        {"cpu": torch.Generator().get_state(), "cpu of process 1": torch.zeros(3, dtype=torch.uint8)},
        r"random\.cpu of process 1 is not the state",
    ),
    "a field that nobody knows": ("more", 1, "more: Extra inputs are not permitted"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_checkpoint_that_the_run_cannot_have_written_is_refused_by_field(
    cut: Path, tmp_path: Path, case: str
) -> None:
    field, value, message = WRONG[case]
    shutil.copytree(cut, tmp_path / "run")
    path = tmp_path / "run" / "seed-0" / FILE
    changed: Any = {**dict(state_of(tmp_path / "run")), field: value}
    save_state(changed, path.parent)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"seed-0/checkpoint\.pt: {message}.*; start this run over with --overwrite"):
        train(recipe(), digits(), tmp_path / "run", device="cpu", resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("part", ["network", "momentum"])
@pytest.mark.parametrize("value", ["nan", "inf", "another shape", "another type"])
def test_a_checkpoint_with_a_wrong_tensor_is_refused_by_name(cut: Path, tmp_path: Path, part: str, value: str) -> None:
    shutil.copytree(cut, tmp_path / "run")
    state = state_of(tmp_path / "run")
    tensors = getattr(state, part)
    if value.startswith("another"):
        tensors["linear.bias"] = (
            tensors["linear.bias"][:3] if value == "another shape" else tensors["linear.bias"].double()
        )
        message = r"linear\.bias is float(32 \(3,\)|64 \(10,\)), expected float32 \(10,\)"
    else:
        tensors["linear.bias"][1] = float(value)
        message = r"linear\.bias holds NaN or infinity"
    save_state(state, tmp_path / "run" / "seed-0")
    with pytest.raises(ValueError, match=rf"checkpoint\.pt: {part}\.{message}"):
        train(recipe(), digits(), tmp_path / "run", device="cpu", resume=True)


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_checkpoint_is_not_run_and_nobody_is_told_to_run_it(tmp_path: Path) -> None:
    code: Any = {"recipe": Harm(tmp_path / "harm")}
    save_state(code, tmp_path)
    with pytest.raises(ValueError, match="holds more than tensors and plain values") as refused:
        load_state(tmp_path)
    assert "weights_only" not in str(refused.value)
    assert not (tmp_path / "harm").exists()
