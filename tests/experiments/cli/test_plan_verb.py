"""``factorized plan``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.cli.conftest import Cli


def test_a_recipe_is_planned_without_its_data(cli: Cli) -> None:
    out = cli("plan", "cifar10/resnet32x2-lowrank-0.1-si-fd").out
    assert "ratio=0.1" in out
    assert "0.1000 of 7,427,914 parameters" in out


def test_a_budget_given_takes_the_place_of_the_recipes(cli: Cli) -> None:
    assert "rank=3:" in cli("plan", "digits/resnet8-lowrank-0.1", "--rank", 3).out
    assert "energy=0.5:" in cli("plan", "digits/resnet8-lowrank-0.1", "--set", "factorize.energy=0.5").out


def test_a_budget_given_for_a_dense_recipe_is_spent_on_low_rank(cli: Cli) -> None:
    assert "LowRank(), ratio=0.2: 6 of 8" in cli("plan", "digits/resnet8", "--ratio", 0.2).out
    assert "Tucker(), ratio=0.2:" in cli("plan", "digits/resnet8", "--ratio", 0.2, "--scheme", "tucker").out


@pytest.mark.parametrize(
    "budget", [("--ratio", 0.2), ("--rank-scale", 0.2), ("--rank", 4), ("--energy", 0.5), ("--macs", 0.4)]
)
def test_a_model_is_planned_by_any_budget(cli: Cli, budget: tuple[str, float]) -> None:
    out = cli("plan", "--model", "resnet8", "--size", 8, "--channels", 1, *budget).out
    assert f"{budget[0][2:].replace('-', '_')}={budget[1]}:" in out
    assert "of 75,002 parameters" in out


def test_a_budget_is_spent_on_chosen_layers_in_multiples(cli: Cli) -> None:
    given = ("--ratio", 0.3, "--of", "selected", "--multiple-of", 4, "--min-size", 3000)
    out = cli("plan", "--model", "resnet8", "--size", 8, "--channels", 1, *given).out
    assert 'ratio=0.3, of="selected", multiple_of=4:' in out
    assert "fewer than min_size=3,000" in " ".join(out.split())


def test_a_plan_by_another_scheme_than_the_recipes_needs_only_its_name(cli: Cli) -> None:
    assert "Monarch(), ratio=0.1" in cli("plan", "digits/resnet8-lowrank-0.1", "--scheme", "monarch").out
    assert (
        "Overcomplete(), rank_scale=1:" in cli("plan", "digits/resnet8-wide-fd", "--set", "factorize.variant=full").out
    )


def test_an_overcomplete_plan_needs_no_budget(cli: Cli) -> None:
    out = cli("plan", "--model", "resnet20", "--scheme", "overcomplete", "--variant", "wide").out
    assert "wide" in out
    assert "of 269,722 parameters" in " ".join(out.split())


def test_a_model_is_planned_with_changes_and_for_images_at_hand(cli: Cli, npz: Path) -> None:
    said = cli("plan", "--model", "resnet8", "--ratio", 0.2, "--set", "factorize.kind=channel", "--data", npz).out
    assert "LowRank(kind='channel'), ratio=0.2" in said
    assert "of 75,002 parameters" in said  # 8×8 and gray, of ten classes


def test_a_plan_for_images_at_hand_takes_their_shape(cli: Cli, npz: Path) -> None:
    assert (
        "of 75,002 parameters"
        in cli("plan", "cifar10/resnet20-lowrank-si", "--set", "model.name=resnet8", "--data", npz).out
    )


def test_a_dense_recipe_has_nothing_to_plan(cli: Cli, tmp_path: Path) -> None:
    said = cli("plan", "digits/resnet8")
    assert "dense network of 75,002 parameters" in said.out
    assert "no plan to draw" in cli("plan", "digits/resnet8", "--html", tmp_path / "plan.html").error


def test_html_draws_the_plan(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert cli("plan", "digits/resnet8-lowrank-0.1", "--html", page).code == 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the name of a recipe, or a model"),
        (["digits/resnet8", "--model", "resnet8"], "and not both"),
        (["--model", "resnet8"], "needs a budget"),
        (["--model", "resnet8", "--ratio", "0.1", "--rank", "3"], "give one of"),
        (["--model", "resnet9", "--ratio", "0.1"], "did you mean 'resnet"),
        (["--model", "resnet8", "--ratio", "0.00001"], "--set factorize.keep_first_and_last=false would reach 0."),
        (["resnet8", "--ratio", "0.1"], "resnet8 is a model, not a recipe; plan it by --model resnet8"),
        (["--model", "resnet8", "--scheme", "svd"], "factorize.scheme"),
        (["--model", "resnet8", "--ratio", "0.1", "--set", "factorize.kid=channel"], "did you mean 'kind'?"),
        (["digits/resnet8-lowrank-0.1", "--classes", "200"], "--classes, --size and --channels are for a --model"),
        (["--model", "resnet8", "--ratio", "0.1", "--size", "8", "--data", "digits"], "--data have their own"),
        (["--model", "resnet8", "--scheme", "overcomplete", "--ratio", "0.1"], "the lowest of Overcomplete, it still"),
        (["--model", "resnet8", "--ratio", "0.1", "--variant", "wide"], "variant = 'wide' is for overcomplete"),
        (["--model", "resnet8", "--ratio", "0.1", "--variant", "full"], "--variant full is for --scheme overcomplete"),
        (["--model", "resnet8", "--ratio", "0.1", "--size", "99999999999"], "makes images of"),
        (["--model", "resnet8", "--ratio", "0.1", "--channels", "99999999999"], "makes images of"),
        (["--model", "resnet8", "--ratio", "0.1", "--classes", "99999999999"], "--classes"),
        (["digits/resnet8-lowrank-0.1", "--html", "plan.txt"], "--html plan.txt: the name of a page must end in .html"),
        (["digits/resnet8-lowrank-0.1", "--html", "/no/such/folder/plan.html"], "No such file or directory"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in cli("plan", *arguments).error
