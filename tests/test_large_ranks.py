"""The benchmark of decay at large ranks runs in small, on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import large_ranks

SIZES = "--layers 1 --width 64 --feed-forward 96 --vocabulary 32 --batch 1 --length 8 --rank 8 --ranks 8"


def test_it_times_the_dense_and_the_low_rank_step_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "large.json"
    options = f"{SIZES} --rounds 1 --repeats 1 --eager --device cpu --out {out}"
    monkeypatch.setattr(sys, "argv", ["large_ranks", *options.split()])
    large_ranks.main()
    report = json.loads(out.read_text())
    assert [(row["rank"], row["decay"]) for row in report["rows"]] == [
        (None, None),
        (8, None),
        *((8, way) for _ in range(2) for way in large_ranks.WAYS),
    ]
    assert all(row["ms"] > 0 for row in report["rows"] + report["alone"])
    assert {row["error"] < 1e-6 for row in report["alone"] if not row["decoupled"]} == {True}
    assert report["rows"][1]["parameters"] < report["rows"][0]["parameters"]
