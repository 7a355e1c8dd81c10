"""``benchmarks.thin`` in small, on the CPU, where the products of torch stand in for the kernels."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import thin


def test_a_layer_is_checked_and_timed_in_every_way(tmp_path: Path) -> None:
    thin.main(["--out", str(tmp_path / "thin.json"), "--batch", "1", "--layers", "1", "--device", "cpu"])
    found = json.loads((tmp_path / "thin.json").read_text())
    (row,) = found["rows"]
    assert row["case"] == list(thin.CASES[0])
    assert min(row["dense"], row["kernels"], row["products"]) > 0
    assert 0 < row["error"] < 0.02
