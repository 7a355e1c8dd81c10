"""``benchmarks.versions`` in small, on the CPU: this checkout, one row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import versions
from benchmarks.version_worker import way_of


def test_a_checkout_gets_a_report_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "NETWORKS", {"ResNet-8": {"dense": "digits/resnet8", "other": "digits/none"}})
    monkeypatch.setattr(versions, "BATCH", 8)
    here = str(Path(versions.__file__).parents[1])
    words = ["--out", str(tmp_path), "--device", "cpu", "--rounds", "2", "--steps", "1", "--compile-seconds", "120"]
    versions.main([here, *words])
    report = json.loads((tmp_path / "0.json").read_text())
    (row,) = report["rows"]
    assert (row["group"], row["way"]) == ("ResNet-8, training step, batch 8", "dense")
    assert row["ms"]["rounds"] == 2
    assert row["ms"]["median"] > 0
    assert (row["over"], row["memory_over"]) == (1, 1)
    assert report["skipped"] == ["ResNet-8, training step, batch 8: other: it was not compiled in time"]


def test_the_llama_is_that_of_the_bench_at_a_rank_with_decay_or_not() -> None:
    ways = {row: way_of(name, 8, torch.device("cpu")) for row, name in versions.NETWORKS["Llama"].items()}
    for way in ways.values():
        way.run()
    counts = {row: way.facts["parameters"] for row, way in ways.items()}
    assert counts["low rank"] == counts["low rank, Frobenius decay"] < counts["dense"]
