"""``benchmarks.decay_kernels`` in small, on the CPU, where torch computes the library's way too."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import decay_kernels


def test_a_network_is_timed_and_checked_in_every_way(tmp_path: Path) -> None:
    out = tmp_path / "decay.json"
    decay_kernels.main(["--out", str(out), "--networks", "ResNet-8", "--rounds", "1", "--device", "cpu"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == list(decay_kernels.ways_of(torch.device("cpu"), []))
    assert [row["workers"] for row in rows] == [["Pair"], ["Plain"], ["Pair"]]
    assert all(row["us"] > 0 and row["error"] < 1e-6 for row in rows)
