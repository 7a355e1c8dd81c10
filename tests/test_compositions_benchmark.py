"""``benchmarks.compositions`` in small, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compositions


def test_both_ways_give_the_same_gradients_and_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compositions, "REPEATS", 1)
    compositions.main(["--out", str(tmp_path / "found.json"), "--depth", "10", "--width", "1", "--device", "cpu"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["scheme"] for row in found["rows"]] == list(compositions.SCHEMES)
    for row in found["rows"]:
        assert row["formats"] < row["weights"] == 6
        assert row["error"] < 1e-12
        assert row["us"].keys() == compositions.WAYS.keys()
        assert min(row["us"].values()) > 0
