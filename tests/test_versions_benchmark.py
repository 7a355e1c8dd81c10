"""``benchmarks.versions`` in small, on the CPU: this checkout, one row."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import versions
from benchmarks.version_worker import capture_in_turn, way_of


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


def test_algorithms_are_chosen_once_it_is_the_turn_of_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []
    cudnn = torch.backends.cudnn

    class Line(io.StringIO):
        def readline(self, size: int = -1, /) -> str:
            seen.append(json.loads(capsys.readouterr().out.removeprefix("@")))
            return "\n"

    monkeypatch.setattr(sys, "stdin", Line())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    with cudnn.flags():
        capture_in_turn(lambda step: step(), lambda: seen.append((cudnn.benchmark, cudnn.deterministic)))
    assert seen == [(False, True), "compiled", (True, False)]


def test_a_process_that_has_compiled_is_told_when_it_is_its_turn(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "print('@\"compiled\"', flush=True)\nassert input() == ''\n"
        "print('@{\"memory\": 1}', flush=True)\nprint('@0.5' if input() == '3' else '', flush=True)\n"
    )
    workers = [versions.Worker(tmp_path, "VGG-19", "dense", torch.device("cpu"), 1, [str(script)]) for _ in range(2)]
    try:
        assert versions.wait_for(workers, 60, None) == workers
        assert [worker.facts for worker in workers] == [{"memory": 1}] * 2
        assert [worker.milliseconds(3) for worker in workers] == [0.5] * 2
    finally:
        for worker in workers:
            worker.end()
