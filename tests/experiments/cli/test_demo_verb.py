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

SHORT = ("--seeds", 1, "--set", "schedule.epochs=1")


def test_the_demo_compares_composes_checks_and_draws(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # a table in a file is as wide as it needs to be
    said = cli("demo", *SHORT, "--out", tmp_path)
    assert said.code == 0, said
    table = said.out.split("variant")[1]
    for label in ("dense", "low rank 0.1", "low rank 0.1, SI", "low rank 0.1, FD", "low rank 0.1, SI & FD"):
        assert re.search(rf"^{label} +\d+\.\d\d +[\d,]+ +[\d,]+ +\d", table, flags=re.MULTILINE)
    assert re.search(r"^overcomplete wide, FD .* 512,762 +75,002 ", table, flags=re.MULTILINE)
    assert table.count("← best low-rank") == 1
    assert len(re.findall(r"← best(?! low-rank)", table)) == 1
    assert re.search(r"ok +low rank 0.1.*, composed: largest error of a logit", said.out)
    assert re.search(r"ok +low rank 0.1.*: share of the dense parameters: 0\.0995", said.out)
    assert "FAIL" not in said.out
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") > 7
    assert "low rank 0.1, SI &amp; FD" in page


def test_the_table_fits_a_terminal_of_80_columns_with_the_best_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"name": "a", "factorize": {"scheme": "low_rank"}}
    results = [{"accuracy": accuracy, "seconds": 123.4, "parameters": 512762, "recipe": recipe} for accuracy in (9, 99)]
    variants = [Variant(label, results, 75002) for label in VARIANTS.values()]
    shown = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("factorized.experiments.cli.demo.console", lambda: shown)
    _print_table(mark_best(variants))
    assert isinstance(shown.file, io.StringIO)
    words = shown.file.getvalue()
    for label in (*VARIANTS.values(), "parameters", "deployed", "← best", "low-rank", "54.00 ± 63.64", "123.4"):
        assert label in words


def test_a_check_that_fails_is_exit_code_1(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "check_winner", lambda winner, run: [Check("it is the same", 1.0, 0.1)])
    monkeypatch.setattr("factorized.experiments.cli.demo.VARIANTS", {"digits/resnet8-lowrank-0.1": "low rank"})
    said = cli("demo", *SHORT, "--out", tmp_path, "--quiet")
    assert said.code == 1
    assert "FAIL  it is the same" in said.out
    assert "FAIL" in (tmp_path / "report.html").read_text()


def test_a_wrong_change_is_one_line(cli: Cli, tmp_path: Path) -> None:
    assert "did you mean 'epochs'?" in cli("demo", "--set", "schedule.epoch=1", "--out", tmp_path).error


def test_the_winners_are_the_best_factorized_one_and_the_best_low_rank_one() -> None:
    def variant(scheme: str, accuracy: float) -> Variant:
        return Variant(scheme, [{"accuracy": accuracy, "recipe": {"factorize": {"scheme": scheme}}}], 1)

    dense, wide, small, smaller = (
        variant(*given) for given in (("none", 99.0), ("overcomplete", 98.0), ("low_rank", 97.0), ("low_rank", 96.0))
    )
    assert demonstration.winners_of([dense, smaller, small, wide]) == [wide, small]
    assert demonstration.winners_of([dense, smaller, small]) == [small]
