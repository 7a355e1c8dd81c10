"""``docs/speed.md`` and the README's chart of speed are made from the reports of ``factorized bench``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_speed, speed
from benchmarks.drawing import drawn_from
from factorized.experiments.bench import session as session_module
from factorized.experiments.bench.names import BENCHMARKS
from factorized.experiments.bench.session import Session, Way

PAGE = (Path(__file__).parents[1] / "docs" / "speed.md").read_text()


def test_the_page_has_a_table_for_every_benchmark() -> None:
    assert sorted(re.findall("<!-- table:(.*?) -->", PAGE)) == sorted(speed.TABLES.keys() - {"speed"})


def test_the_figures_are_drawn_from_the_reports() -> None:
    expected = {name: checksum for name, (checksum, _) in speed.figures().items()}
    assert {name: drawn_from(speed.FIGURES / name) for name in expected} == expected
    assert {path.name for path in speed.FIGURES.glob("speed*.svg")} == expected.keys()
    assert [name for name in expected if f"figures/{name}" not in PAGE and name != "speed.svg"] == []


def test_every_benchmark_was_measured_on_a_cpu() -> None:
    reports = {name: speed.read("cpu", name) for name in BENCHMARKS}
    assert all(report and report["rows"] and report["machine"]["commit"] for report in reports.values())


def row(group: str, way: str, ms: float, over: float, memory_over: float = 0.5) -> dict[str, Any]:
    spread = {"median": ms, "least": ms - 1, "largest": ms + 1, "rounds": 5}
    facts = {"parameters": 1234, "memory": 2**21, "over": over, "memory_over": memory_over}
    return {"group": group, "way": way, "ms": spread, **facts}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        row("Net, training step, batch 8", "dense", 10, 1.0, 1.0),
        row("Net, training step, batch 8", "low rank 0.1", 13, 1.3, 1.1),
        row("Net, training step, batch 8", "low rank 0.02", 5, 0.5),
    ]
    packages = {"transformers": "5.0"}
    machine = {"device": "NVIDIA H200", "threads": 1, "torch": "2.11", "commit": "0123456789", "packages": packages}
    report = {"benchmark": "training", "machine": machine, "clock": "CUDA events", "rows": rows, "fits": []}
    (tmp_path / "bench-h200").mkdir()
    (tmp_path / "bench-h200/training.json").write_text(json.dumps({**report, "skipped": ["peft: not installed"]}))
    return tmp_path


def test_a_table_has_times_with_their_spread_and_what_was_left_out(results: Path) -> None:
    text = speed.table("training", results)
    assert "| Net, training step, batch 8 | dense | 1,234 | 10 (9 to 11) | 1.00 | 2.0 | 1.00 |" in text
    assert "|  | low rank 0.1 | 1,234 | 13 (12 to 14) | 1.30 | 2.0 | 1.10 |" in text
    assert "NVIDIA H200, 1 thread, torch 2.11, transformers 5.0; commit 0123456." in text
    assert "n = 5 interleaved rounds by CUDA events" in text
    assert "Not measured: peft: not installed." in text
    assert speed.table("decay", results) == "Not measured yet."


def test_what_is_slower_or_larger_than_dense_is_listed(results: Path) -> None:
    excess = "1.30 times the time and 1.10 times the memory of dense."
    assert speed.slower(results) == f"- H200, Net, training step, batch 8: low rank 0.1 takes {excess}"
    text = speed.overview(results)
    assert "Net, low rank 0.1, training step takes 1.30 times as long as dense on H200." in text
    assert "0.02" not in text
    assert "On a GPU, narrow networks" not in text


def test_the_chart_of_the_readme_has_a_bar_for_each_row(results: Path, tmp_path: Path) -> None:
    (axes,) = speed.overview_figure(results).axes
    assert [bar.get_width() for bar in axes.patches] == [1.3, 0.5]
    speed.draw_figures(tmp_path / "figures", results)
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == ["speed-training-h200.svg", "speed.svg"]
    before = (tmp_path / "figures/speed.svg").read_text()
    assert drawn_from(tmp_path / "figures/speed.svg") == speed.figures(results)["speed.svg"][0]
    assert "prefers-color-scheme" in before


def test_every_row_that_a_gpu_compiles_first_is_one_that_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, list[str]] = {}

    def compare(session: Session, group: str, makers: dict[str, object], *_: object, **__: object) -> None:
        found.setdefault(session.name, []).extend(f"{group}: {way}" for way in makers)

    monkeypatch.setattr(Session, "compare", compare)
    monkeypatch.setattr(session_module, "describe_machine", lambda device: {})
    for name in ("training", "inference", "llama", "decay"):
        BENCHMARKS[name].load()(Session(name, tmp_path / "none.json", torch.device("cuda")))
    for name, only in gpu_speed.compiled_rows():
        assert len([row for row in found[name] if only in row]) == 1, only
    parts = [*gpu_speed.EAGER, *gpu_speed.COMPILED, *gpu_speed.LONGEST]
    assert {name for name, _ in parts} == set(BENCHMARKS)


def test_a_part_that_fails_on_a_gpu_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(session: Session) -> None:
        session.compare("group", {"dense": lambda: Way(lambda: torch.ones(2).sum())})

    def broken(session: Session) -> None:
        measured(session)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_speed, "EAGER", [("llama", broken), ("growth", broken)])
    monkeypatch.setattr(gpu_speed, "COMPILED", [("decay", measured), ("llama", measured)])
    monkeypatch.setattr(gpu_speed, "LONGEST", [])
    monkeypatch.setattr(gpu_speed, "compiled_rows", lambda: [("decay", "no such row"), ("layers", "")])
    arguments = [
        "llama",
        "decay",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--seconds",
        "0.001",
        "--compile-seconds",
        "0.2",
    ]
    gpu_speed.main(arguments)
    report = json.loads((tmp_path / "llama.json").read_text())
    assert (len(report["rows"]), report["skipped"]) == (2, ["llama: RuntimeError: out of memory"])
    assert len(json.loads((tmp_path / "decay.json").read_text())["rows"]) == 1
    assert not (tmp_path / "growth.json").exists()  # was not asked for
    gpu_speed.main(["--out", str(tmp_path), "--device", "cpu", "--warm", "layers", "no such row"])
    assert json.loads((tmp_path / "layers.json").read_text())["rows"] == []


@pytest.mark.parametrize(("fused", "but"), [(0.2, ", and 0.40 with `fz.integrations.fuse_decoder`"), (None, "")])
def test_models_that_decode_more_slowly_than_dense_are_listed(tmp_path: Path, fused: float | None, but: str) -> None:
    def decoded(batch: int, way: str, ms: float, *options: str) -> dict[str, Any]:
        facts = {"parameters": 444_631_040} if way == "dense" else {}
        return {"model": "llama-445m", "batch": batch, "way": way, "milliseconds": ms, "options": [*options], **facts}

    older = [decoded(1, "dense", 9.0), decoded(1, "low rank", 0.1), decoded(8, "dense", 0.5)]
    older += [decoded(8, "low rank", 0.4), decoded(8, "low rank", 0.9, "coordinate_descent_tuning")]
    newer = [decoded(1, "dense", 0.5), decoded(1, "low rank", 0.6), *([decoded(1, "fused", fused)] if fused else [])]
    for name, rows in {"decode-h200": older, "decode-attention-h200": newer}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    place = "H200, decoding one sequence (8 layers, 2048 wide, 445 M parameters)"
    sentence = f"{place}: low rank takes 1.20 times the time of dense{but}."
    assert speed.slower(tmp_path) == f"- {sentence}"
    assert speed.overview(tmp_path).splitlines()[-1] == f"Slower: {sentence}"


def test_decoding_shows_the_last_file_that_has_a_model_and_batch_and_the_fused_attention_apart(tmp_path: Path) -> None:
    def decoded(batch: int, way: str, ms: float, *options: str) -> dict[str, Any]:
        dense = {"parameters": 444_631_040} if way == "dense" else {}
        return {"model": "llama-445m", "batch": batch, "way": way, "milliseconds": ms, "options": [*options], **dense}

    machine = {"device": "NVIDIA H200", "torch": "2.11", "commit": "0123456789"}
    older = [decoded(1, "dense", 9), decoded(8, "dense", 0.5), decoded(8, "low rank", 0.4), decoded(8, "chains", 9)]
    tuned = {**decoded(1, "fused", 0.1, "coordinate_descent_tuning"), "commit": "abcdef01"}
    newer = [decoded(1, "dense", 0.3), decoded(1, "fused", 0.2), tuned, decoded(1, "fused, BLOCK=512", 9)]
    newest = [decoded(1, "dense", 0.29), decoded(1, "fused", 0.15)]
    files = {"decode-h200": (older, 7), "decode-fused-h200": (newer, 9), "decode-attention-h200": (newest, 9)}
    for name, (rows, rounds) in files.items():
        report = {"machine": machine, "rounds": rounds, "repeats": 20, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    lines = speed.decoding(tmp_path).splitlines()
    assert lines[2:5] == [
        "| 8 layers, 2048 wide, 445 M parameters | 1 | 0.300 |  |  |  | 0.200 | 0.100 |",
        "| 8 layers, 2048 wide, 445 M parameters; attention fused, too | 1 | 0.290 |  |  |  | 0.150 |  |",
        "| 8 layers, 2048 wide, 445 M parameters | 8 | 0.500 |  | 0.400 |  |  |  |",
    ]
    assert lines[-1] == (
        "NVIDIA H200, torch 2.11; commits 0123456, abcdef0. Medians of n = 7 or 9 interleaved rounds of 20 tokens."
    )
