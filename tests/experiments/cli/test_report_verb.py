"""``factorized report``."""

from __future__ import annotations

from pathlib import Path

from tests.experiments.cli.conftest import RECIPE, Cli
from tests.experiments.reproduce.made import image_result, write

SI = "cifar10/resnet32x2-lowrank-0.1-si"


def test_a_trained_run_becomes_a_page_with_its_layers(cli: Cli, trained: Path, tmp_path: Path) -> None:
    said = cli("report", trained, "--out", tmp_path, "--title", "My <run>")
    assert said.code == 0, said
    assert "1 run of 1 variant\n" in said.out
    page = (tmp_path / "report.html").read_text()
    assert "My &lt;run&gt;" in page
    assert "1 of 12 epochs" in page
    slug = f"layers-{RECIPE.replace('/', '-')}"
    table = (tmp_path / f"tables/{slug}.md").read_text()
    assert "| layer | kind | shape | rank | parameters | of dense | frobenius | spectral | nuclear |" in table
    assert "| conv | 16×16×3×3 |" in table


def test_the_papers_runs_are_counted_against_the_paper(cli: Cli, tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", image_result(SI, 0, 93.0))
    (runs / "half.json").write_text("{")
    said = cli("report", runs, "--out", tmp_path / "out")
    assert said.code == 0, said
    assert "1 of 1 within two of the paper's deviations (0.8 expected if only seeds differed)" in said.out
    assert "half.json: not valid JSON" in said.out
    assert str(tmp_path / "out/report.html") in said.out


def test_quiet_still_names_what_was_left_out(cli: Cli, tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", image_result(SI, 0, 93.0))
    (runs / "half.json").write_text("{")
    said = cli("report", runs, "--out", tmp_path / "out", "--quiet")
    assert said.out.count("\n") == 1
    assert "half.json" in said.out


def test_results_that_are_not_there_are_one_line(cli: Cli, tmp_path: Path) -> None:
    assert "there is no file or folder" in cli("report", tmp_path / "nowhere", "--out", tmp_path / "out").error
    assert "there is no result of a run in" in cli("report", tmp_path, "--out", tmp_path / "out").error


def test_figures_are_drawn_where_asked_for(cli: Cli, trained: Path, trained_dense: Path, tmp_path: Path) -> None:
    assert "figure1.svg" in cli("report", trained, "--out", tmp_path, "--figures").out
    assert (tmp_path / "figures/figure1.png").is_file()
    assert (
        "no figure: none of the runs recorded norms" in cli("report", trained_dense, "--out", tmp_path, "--figures").out
    )
