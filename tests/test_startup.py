"""``benchmarks.startup`` in small, on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import startup

RECIPE, SMALL = "cifar10/resnet20-lowrank-fd", ["run.batch=2"]


def test_the_parts_of_a_start_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.utils.counters.clear()
    monkeypatch.setenv(startup.BEGAN, str(time.time()))
    row = startup.start(RECIPE, SMALL, images=8, device="cpu")
    parts = [row[part] for part in ("torch", "imports", "data", "device", *startup.PARTS, "step", "first step")]
    assert sum(parts) == pytest.approx(row["first_step"], abs=0.01)
    assert row["ms_per_step"] > 0
    assert row["graphs"] == 0  # on a CPU nothing is compiled


@pytest.mark.nightly
def test_a_recipe_is_started_with_an_empty_and_with_a_filled_cache(tmp_path: Path) -> None:
    out = tmp_path / "startup.json"
    changes = [f"--set={change}" for change in SMALL]
    startup.main([RECIPE, *changes, "--images", "8", "--device", "cpu", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["recipe"], row["cache"]) for row in rows] == [(RECIPE, "cold"), (RECIPE, "warm")]
