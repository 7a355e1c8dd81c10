"""The paper's cells beside our runs."""

from __future__ import annotations

import pytest
import torch

from factorized.experiments.recipes.find import paper_cells
from factorized.experiments.reproduce.compare import Comparison, chance_within, compare
from factorized.experiments.reproduce.variant import group_runs
from tests.experiments.reproduce.made import image_result, run_of

SI = "cifar10/resnet32x2-lowrank-0.1-si"  # 92.52 ± 0.66 in table 1
WIDE = "cifar10/wrn28-10-lowrank-0.06667-fd-si"  # an error of 3.86 ± 0.22 in table 2


def one(name: str, *accuracies: float, changes: tuple[str, ...] = ()) -> Comparison:
    runs = [run_of(image_result(name, seed, accuracy, *changes)) for seed, accuracy in enumerate(accuracies)]
    (found,) = (c for c in compare(group_runs(runs)) if c.variant is not None)
    return found


def test_a_difference_is_counted_in_the_papers_deviations() -> None:
    found = one(SI, 93.0, 93.36)
    assert (found.paper.mean, found.paper.deviation) == (92.52, 0.66)
    assert found.ours is not None
    assert found.ours.n == 2
    assert found.difference == pytest.approx(0.66)
    assert found.in_deviations == pytest.approx(1.0)
    assert found.verdict == "within"


@pytest.mark.parametrize(("accuracy", "verdict"), [(93.84, "within"), (93.85, "off"), (91.2, "within"), (91.19, "off")])
def test_two_deviations_are_within_the_band_and_more_are_not(accuracy: float, verdict: str) -> None:
    assert one(SI, accuracy).verdict == verdict  # 93.84 - 92.52 is two deviations of 0.66 but for rounding


@pytest.mark.parametrize(
    ("accuracies", "chance"),
    [((92.52,), 1.0), ((93.84,), 1 - (0.6) ** 0.5), ((93.84, 93.84, 93.84), 0.1339746)],  # t = 0, √3 and √6
)
def test_a_difference_has_a_probability_by_students_t_with_two_degrees(
    accuracies: tuple[float, ...], chance: float
) -> None:
    assert one(SI, *accuracies).chance == pytest.approx(chance)


def test_the_probability_is_that_of_drawn_trials() -> None:
    draw = torch.Generator().manual_seed(0)
    paper, ours = torch.randn(200_000, 3, generator=draw), torch.randn(200_000, 2, generator=draw)
    away = (ours.mean(1) - paper.mean(1)).abs() / paper.std(1)
    for deviations in (0.5, 2.0, 4.0):
        drawn = (away <= deviations).float().mean()
        assert chance_within(deviations, 2) == pytest.approx(float(drawn), abs=4e-3)


def test_runs_that_are_not_compared_have_no_probability() -> None:
    (missing, *_) = (c for c in compare(group_runs([run_of(image_result(SI, 0, 93.0))])) if c.variant is None)
    assert missing.chance is None
    assert one(SI, 50.0, changes=("schedule.epochs=2",)).chance is None
    assert one(SI, 92.5, changes=("optimizer.lr=0.01",)).chance is None


def test_errors_are_compared_as_errors() -> None:
    found = one(WIDE, 96.03)
    assert found.ours is not None
    assert found.ours.mean == 3.97
    assert found.in_deviations == pytest.approx(0.5)


def test_shortened_and_changed_runs_are_not_judged() -> None:
    assert one(SI, 50.0, changes=("schedule.epochs=2",)).verdict == "shortened"
    assert one(SI, 92.5, changes=("optimizer.lr=0.01",)).verdict == "changed"


def test_cells_of_the_same_tables_that_nobody_trained_are_missing() -> None:
    found = compare(group_runs([run_of(image_result(SI, 0, 93.0))]))
    missing = [c for c in found if c.verdict == "missing"]
    aims = [cell for cell in paper_cells() if cell.table == 1 and cell.recipe and cell.figure is not None]
    assert len(missing) == len(aims) - 1
    assert all(c.cell.source is None for c in found)
    assert {c.cell.table for c in found} == {1}


def test_runs_of_ones_own_have_nothing_to_be_compared_with() -> None:
    assert compare(group_runs([run_of(image_result("digits/resnet8", 0, 97.0))])) == []
