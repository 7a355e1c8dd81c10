"""``factorized demo``."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from factorized.experiments.cli.demo import VARIANTS, _print_table
from factorized.experiments.reproduce import demonstration
from factorized.experiments.reproduce.report import Check
from factorized.experiments.reproduce.variant import Variant, mark_best
from tests.experiments.cli.conftest import Cli
from tests.experiments.reproduce.made import image_result, run_of

SHORT = ("--seeds", 1, "--set", "schedule.epochs=1")


def test_the_demo_compares_composes_checks_and_draws(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # a table in a file is as wide as it needs to be
    said = cli("demo", *SHORT, "--out", tmp_path)
    assert said.code == 0, said
    table = said.out.split("variant")[1]
    for label in ("dense", "low rank 0.1", "low rank 0.1, SI", "low rank 0.1, FD", "low rank 0.1, SI & FD"):
        assert re.search(rf"^{label} +\d+\.\d\d +[\d,]+ +[\d,]+ +\d", table, flags=re.MULTILINE)
    assert re.search(r"^overcomplete wide, FD .* 512,762 +75,002 ", table, flags=re.MULTILINE)
    assert "← best" not in table  # one seed tells nothing apart
    assert "one seed each (n = 1)" in said.out
    checks = said.out.split("\nChecks of 'low rank 0.1")[1]
    assert re.search(r"^ok +composed: relative error of logits +\S+ +0\.0001$", checks, flags=re.MULTILINE)
    assert re.search(r"^ok +parameters: share of the dense ones +0\.0995 +0\.1$", checks, flags=re.MULTILINE)
    assert max(map(len, checks.splitlines()[:-1])) <= 80
    assert "FAIL" not in said.out
    page = (tmp_path / "report.html").read_text()
    assert page.count('<svg class="chart"') == 7  # accuracy, loss, and the products of five variants
    assert "low rank 0.1, SI &amp; FD" in page
    assert (tmp_path / "tables/variants.csv").read_text().count("\n") == 7


def test_the_table_fits_a_terminal_of_80_columns_with_the_best_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"parameters": 512762, "seconds": 123.4, "composed": {"parameters": 75002}}
    name = "digits/resnet8-wide-fd"
    variants = [
        Variant([run_of(image_result(name, seed, score + seed, **figures)) for seed in (0, 1)], label)
        for score, label in zip(range(50, 98, 8), VARIANTS.values(), strict=True)
    ]
    shown = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("factorized.experiments.cli.demo.console", lambda: shown)
    _print_table(mark_best(variants))
    assert isinstance(shown.file, io.StringIO)
    words = shown.file.getvalue()
    for label in (*VARIANTS.values(), "parameters", "75,002", "← best", "of its", "90.50 ± 0.71", "123.4"):
        assert label in words


def test_a_check_that_fails_is_exit_code_1(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "check_winner", lambda winner, run: [Check("it is the same", 1.0, 0.1)])
    monkeypatch.setattr("factorized.experiments.cli.demo.VARIANTS", {"digits/resnet8-lowrank-0.1": "low rank"})
    said = cli("demo", *SHORT, "--out", tmp_path, "--quiet")
    assert said.code == 1
    assert re.search(r"^FAIL +it is the same +1 +0\.1$", said.out, flags=re.MULTILINE)
    assert "low rank, it is the same" in (tmp_path / "report.html").read_text()


def test_a_run_in_bfloat16_passes_its_checks(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorized.experiments.cli.demo.VARIANTS", {"digits/resnet8-wide-fd": "wide"})
    said = cli("demo", *SHORT, "--set", "run.precision=bfloat16", "--out", tmp_path)
    assert said.code == 0, said


def test_a_wrong_change_is_one_line(cli: Cli, tmp_path: Path) -> None:
    assert "did you mean 'epochs'?" in cli("demo", "--set", "schedule.epoch=1", "--out", tmp_path).error


def test_the_winners_are_the_best_factorized_one_and_the_best_low_rank_one() -> None:
    def variant(name: str, accuracy: float) -> Variant:
        return Variant([run_of(image_result(f"digits/resnet8{name}", 0, accuracy))], name)

    dense, wide, small, smaller = (
        variant(*given) for given in (("", 99.0), ("-wide-fd", 98.0), ("-lowrank-0.1-si", 97.0), ("-lowrank-0.1", 96.0))
    )
    assert demonstration.winners_of([dense, smaller, small, wide]) == [wide, small]
    assert demonstration.winners_of([dense, smaller, small]) == [small]
