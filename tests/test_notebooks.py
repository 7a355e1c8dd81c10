"""The notebooks run, and hold small outputs of their own cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.notebooks import NOTEBOOKS, run


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(json.loads(path.read_text()))
    assert sum(map(bool, printed)) >= 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_cells_printed_in_order_and_is_small(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(bool(cell["outputs"]) == ("print(" in "".join(cell["source"])) for cell in cells)
    assert path.stat().st_size < 20_000


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["distillation", "five_minutes", "transformers"]


def test_the_last_expression_of_a_cell_is_shown_as_in_a_kernel() -> None:
    cells = [{"cell_type": "code", "source": [line]} for line in ("x = 2\n", "x + 1", "print('a')\nNone")]
    assert run({"cells": [{"cell_type": "markdown", "source": ["# A"]}, *cells]}) == ["", "3\n", "a\n"]
