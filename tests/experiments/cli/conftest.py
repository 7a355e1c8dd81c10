"""The command line in this process, and a run that it trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from factorized.experiments.cli.main import main

RECIPE = "digits/resnet8-lowrank-0.1-si-fd"
SHORT = ("--set", "schedule.epochs=1")


@dataclass(frozen=True)
class Said:
    """What a command left behind: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error."""
        assert self.code == 2, self
        assert self.err.startswith("factorized: ")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err


Cli = Callable[..., Said]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command as if in a terminal of 140 columns, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "140")

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short low-rank run."""
    out = tmp_path_factory.mktemp("trained")
    assert main(["train", RECIPE, *SHORT, "--out", str(out), "--quiet"]) == 0
    return out / RECIPE / "seed-0"


@pytest.fixture(scope="session")
def trained_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short dense run."""
    out = tmp_path_factory.mktemp("trained")
    assert main(["train", "digits/resnet8", *SHORT, "--out", str(out), "--quiet"]) == 0
    return out / "digits/resnet8/seed-0"


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    """Gray 8×8 noise of 10 classes, 128 images to train on and 20 to test."""
    random = np.random.default_rng(0)
    path = tmp_path / "noise.npz"
    arrays = {}
    for part, count in (("train", 128), ("test", 20)):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % 10
    np.savez(path, **arrays)
    return path
