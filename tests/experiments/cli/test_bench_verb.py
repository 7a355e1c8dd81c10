"""``factorized bench``: the list, a run, wrong names."""

from __future__ import annotations

import json
from pathlib import Path

from factorized.experiments.bench.names import BENCHMARKS
from factorized.experiments.cli.bench import complete_benchmark
from tests.experiments.cli.conftest import Cli


def test_without_a_name_the_benchmarks_are_listed(cli: Cli) -> None:
    said = cli("bench")
    assert said.code == 0
    assert all(f"{name} " in said.out and benchmark.about in said.out for name, benchmark in BENCHMARKS.items())


def test_a_benchmark_writes_its_report_and_charts_and_says_where(cli: Cli, tmp_path: Path) -> None:
    only = "spectral initialization, 512×512 at rank 16"
    said = cli("bench", "initialization", "--out", tmp_path, "--device", "cpu", "--seconds", "0.01", "--only", only)
    assert said.code == 0, said
    report = json.loads((tmp_path / "initialization.json").read_text())
    assert {row["group"] for row in report["rows"]} == {only}
    assert report["rows"][0]["way"] == "exact SVD"
    assert f"{tmp_path}/initialization.json, {tmp_path}/initialization.png" in said.out
    assert "of the first" in said.out


def test_a_quiet_run_says_only_where_its_files_are(cli: Cli, tmp_path: Path) -> None:
    said = cli("bench", "layers", "--out", tmp_path, "--device", "cpu", "--only", "no such row", "--quiet")
    assert (said.code, said.out) == (0, f"{tmp_path}\n")


def test_only_that_matches_no_row_names_some_rows(cli: Cli, tmp_path: Path) -> None:
    said = cli("bench", "layers", "--out", tmp_path, "--device", "cpu", "--only", "ResNet")
    assert "no row has 'ResNet' in its name; there are linear 1024×1024, 256 rows, training: dense; " in said.out


def test_wrong_arguments_say_what_is_allowed(cli: Cli, tmp_path: Path) -> None:
    error = cli("bench", "layers", "trainings", "--out", tmp_path).error
    assert "there is no benchmark 'trainings' (did you mean 'training'?); there are training, inference" in error
    assert "--device must be cpu" in cli("bench", "layers", "--device", "gpu").error
    assert list(tmp_path.iterdir()) == []


def test_names_are_completed() -> None:
    assert complete_benchmark("in") == ["inference", "initialization"]
    assert "all" in complete_benchmark("")
