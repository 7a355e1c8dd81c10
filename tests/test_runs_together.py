"""``benchmarks.together`` in small, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import together

SMALL = ["cifar10/resnet20", "--images", "20", "--device", "cpu", "--set", "run.batch=2"]


def test_epochs_of_runs_at_once_are_timed_against_those_of_a_run_alone(tmp_path: Path) -> None:
    out = tmp_path / "made" / "together.json"
    together.main([*SMALL, "--runs", "1", "2", "--epochs", "3", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["machine"]["torch"] == torch.__version__
    assert (report["recipe"], report["epochs"]) == ("cifar10/resnet20", 3)
    alone, both = report["rows"]
    assert (alone["runs"], alone["gain"], both["runs"]) == (1, 1.0, 2)
    assert both["gain"] == pytest.approx(2 * alone["seconds_per_epoch"] / both["seconds_per_epoch"], abs=0.02)


def test_epochs_that_only_warm_up_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        together.main([*SMALL, "--epochs", "2", "--out", str(tmp_path / "together.json")])
    assert "--epochs must be at least 3" in capsys.readouterr().err
