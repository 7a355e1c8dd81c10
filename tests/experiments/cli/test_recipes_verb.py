"""``factorized recipes``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from factorized.experiments.recipes.find import check_recipe, load_recipe, recipe_names
from tests.experiments.cli.conftest import Cli


def test_all_recipes_are_listed_with_the_papers_figures(cli: Cli) -> None:
    out = cli("recipes", "ls").out
    assert all(name in out for name in recipe_names())
    row = next(line for line in out.splitlines() if line.startswith("cifar10/resnet32x2-lowrank-0.1-si-fd "))
    assert "table 1" in row
    assert row.rstrip().endswith("94.34 ± 0.34")


def test_a_part_of_the_name_selects(cli: Cli) -> None:
    assert cli("recipes", "ls", "digits/resnet8-wide", "-q").out == "digits/resnet8-wide-fd\n"
    assert "no recipe has 'resnet9'" in cli("recipes", "ls", "resnet9").error


def test_show_prints_the_file_and_whole_prints_what_it_comes_to(cli: Cli) -> None:
    name = "digits/resnet8-lowrank-0.1-si-fd"
    assert cli("recipes", "show", name).out.startswith(f"# factorized train {name}\nextends = ")
    whole = tomllib.loads(cli("recipes", "show", name, "--whole").out)
    assert check_recipe(whole, name) == load_recipe(name)


def test_show_writes_a_cell_of_a_table_out(cli: Cli, tmp_path: Path) -> None:
    name = "cifar10/resnet32x2-lowrank-0.1-si-fd"
    shown = cli("recipes", "show", name).out
    assert shown.startswith(f'# factorized train {name} --data DIR\ntitle = "ResNet-32x2 on CIFAR-10, ')
    own = tmp_path / "own.toml"
    own.write_text(shown)
    assert load_recipe(str(own)).model_copy(update={"name": name}) == load_recipe(name)


def test_whole_recipes_survive_toml_whatever_they_hold(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('extends = "cifar10/resnet32x2"\ntitle = "Größe \\"2\\""\n[factorize]\nexclude = ["a", "b.c"]\n')
    own.write_text(own.read_text() + 'scheme = "overcomplete"\n')
    whole = tomllib.loads(cli("recipes", "show", own, "--whole").out)
    assert check_recipe(whole, "own") == load_recipe(str(own))


def test_an_unknown_recipe_names_the_nearest(cli: Cli) -> None:
    assert "did you mean 'digits/resnet8-wide-fd'?" in cli("recipes", "show", "digits/resnet8-wide").error
    assert "there is no recipe file own.toml" in cli("recipes", "show", "own.toml").error


@pytest.mark.parametrize("columns", ["80", "119", "120"])
def test_names_are_whole_in_a_narrow_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    out = cli("recipes", "ls", "tiny-imagenet/resnet32x2").out
    assert "…" not in out
    assert "tiny-imagenet/resnet32x2-lowrank-0.05-si-fd " in out
    assert ("what it" in out) == (columns == "120")
