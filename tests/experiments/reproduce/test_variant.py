"""Runs become variants; "best" is said only where the difference exceeds the deviations."""

from __future__ import annotations

import pytest

from factorized.experiments.reproduce.runs import Run
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.tables import run_table
from factorized.experiments.reproduce.variant import Variant, group_runs, is_ahead, mark_best
from tests.experiments.reproduce.made import LAYER, MACHINE, image_result, run_of, text_result

DENSE, LOW, BOTH = "digits/resnet8", "digits/resnet8-lowrank-0.1", "digits/resnet8-lowrank-0.1-si-fd"


def runs(name: str, *accuracies: float, changes: tuple[str, ...] = (), **fields: object) -> list[Run]:
    return [run_of(image_result(name, seed, accuracy, *changes, **fields)) for seed, accuracy in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("values", "text"), [([94.0], "94.00"), ([94.0, 95.0], "94.50 ± 0.71"), ([1.0, 1.0, 1.0], "1.00 ± 0.00")]
)
def test_a_summary_is_mean_and_sample_deviation(values: list[float], text: str) -> None:
    summary = Summary.of(values)
    assert str(summary) == text
    assert summary.n == len(values)


def test_runs_of_one_recipe_are_one_variant_however_often_they_were_evaluated() -> None:
    often = runs(DENSE, 97.0, changes=("run.evaluate_every=1", "run.diagnose=false"))
    (variant,) = group_runs([*often, run_of(image_result(DENSE, 1, 98.0, "run.evaluate_every=2"))])
    assert (variant.score.mean, variant.score.n) == (97.5, 2)
    assert variant.comparable


def test_fields_that_an_older_version_did_not_have_do_not_part_runs() -> None:
    old = image_result(DENSE, 0, 97.0)
    del old["recipe"]["optimizer"]["clip"]
    old["recipe"]["factorize"]["attention"] = False  # decides nothing for a dense network
    old["recipe"]["paper"] = {"table": 1, "accuracy": 90.0}
    assert len(group_runs([run_of(old), *runs(DENSE, 98.0)])) == 1


def test_other_settings_and_other_data_are_other_variants_that_say_so() -> None:
    other = image_result(DENSE, 0, 95.0)
    other["data"] = {**other["data"], "checksum": "0123456789abcdef"}
    changed = runs(DENSE, 96.0, changes=("optimizer.lr=0.05",))
    found = group_runs([*runs(DENSE, 97.0), *changed, run_of(other)])
    assert [variant.label for variant in found] == [
        f"{DENSE} (data sha-of-d…)",
        f"{DENSE} (optimizer.lr=0.05, data sha-of-d…)",
        f"{DENSE} (data 01234567…)",
    ]
    assert found[1].changes == {"optimizer.lr": 0.05}
    assert not found[1].comparable


def test_fewer_epochs_than_the_recipe_has_are_a_shortened_run() -> None:
    (variant,) = group_runs(runs(DENSE, 97.0, changes=("schedule.epochs=2",)))
    assert variant.shortened == "2 of 12 epochs"
    assert variant.changes == {}
    assert not variant.comparable


def variant_of(name: str, *accuracies: float, **fields: object) -> Variant:
    return group_runs(runs(name, *accuracies, **fields))[0]


def test_the_best_is_marked_where_it_is_ahead_by_more_than_the_deviations() -> None:
    dense, plain, both = variant_of(DENSE, 99.0, 99.2), variant_of(LOW, 96.0, 96.2), variant_of(BOTH, 97.0, 97.2)
    assert [v.marks for v in mark_best([dense, plain, both])] == [("best",), (), ("best of its size",)]
    assert [v.marks for v in mark_best([plain, both])] == [(), ("best", "best of its size")]


def test_the_best_of_shortened_runs_is_not_best_beside_better_whole_runs() -> None:
    scores = {LOW: (80.0, 80.2), BOTH: (85.0, 85.2)}
    made = [image_result(name, seed, scores[name][seed], "schedule.epochs=2") for name in scores for seed in (0, 1)]
    shortened = group_runs(map(run_of, made))
    best = ("best", "best of its size")
    assert [v.marks for v in mark_best(shortened)] == [(), best]
    assert [v.marks for v in mark_best([variant_of(LOW, 70.0, 70.2), *shortened])] == [(), (), best]
    whole = variant_of(DENSE, 99.0, 99.2), variant_of(LOW, 96.0, 96.2)
    assert [v.marks for v in mark_best([*whole, *shortened])] == [("best",), (), (), ()]


def test_overcomplete_networks_of_one_deployed_size_are_compared_with_each_other() -> None:
    full, wide = "cifar10/resnet32-full-fd", "cifar10/resnet32-wide-fd"
    small, large = ({"parameters": size, "composed": {"parameters": 464_154}} for size in (947_994, 2_837_274))
    found = [variant_of(full, 96.0, 96.2, **small), variant_of(wide, 98.0, 98.2, **large)]
    assert [v.marks for v in mark_best(found)] == [(), ("best", "best of its size")]


@pytest.mark.parametrize("close", [(96.6, 98.4), (98.0,)], ids=["within the deviations", "a single run"])
def test_nothing_is_best_within_the_deviations_or_of_one_run(close: tuple[float, ...]) -> None:
    assert [v.marks for v in mark_best([variant_of(LOW, 96.0, 97.0), variant_of(BOTH, *close)])] == [(), ()]
    assert [v.marks for v in mark_best([variant_of(LOW, 96.0, 97.0)])] == [()]


def test_lower_is_better_for_perplexity() -> None:
    names = ("language/tiny", "language/tiny-lowrank-0.5")
    scores = {names[0]: (80.0, 80.5), names[1]: (90.0, 90.5)}
    made = [text_result(name, seed, "perplexity", value) for name in names for seed, value in enumerate(scores[name])]
    assert [v.marks for v in mark_best(group_runs(map(run_of, made)))] == [("best",), ()]


def test_a_difference_must_exceed_the_deviation_of_the_difference() -> None:
    assert is_ahead(Summary(1.6, 0.9, 3), Summary(0.0, 1.2, 3))  # whose deviation is 1.5
    assert not is_ahead(Summary(1.4, 0.9, 3), Summary(0.0, 1.2, 3))


def test_seconds_are_of_runs_that_had_their_device_for_themselves() -> None:
    shared = image_result(DENSE, 1, 98.0, seconds=100.0, note="shared the GPU")
    seconds = group_runs([*runs(DENSE, 97.0), run_of(shared)])[0].seconds
    assert seconds is not None
    assert (seconds.mean, seconds.n) == (4.0, 1)
    assert group_runs([run_of(shared)])[0].seconds is None
    in_turn = run_of(image_result(DENSE, 1, 98.0, machine={**MACHINE, "runs_at_once": 3}))
    assert group_runs([in_turn])[0].seconds is None
    assert "| not timed |" in run_table(group_runs([in_turn])).to_markdown()
    assert "3 runs at once" in run_table(group_runs([in_turn])).to_markdown()


def test_factors_that_cost_more_than_their_product_are_not_deployed() -> None:
    wide = {**LAYER, "params": 5000, "dense_params": 2304}
    assert variant_of("digits/resnet8-wide-fd", 97.0, layers=[LAYER, wide]).deployed == 7466 - (5000 - 2304)
    assert variant_of("digits/resnet8-wide-fd", 97.0, composed={"parameters": 4000}).deployed == 4000
    assert variant_of("digits/resnet8-wide-fd", 97.0).deployed is None
    assert variant_of(LOW, 97.0).deployed == 7466


def test_curves_are_means_between_the_least_and_the_greatest() -> None:
    curve = variant_of(DENSE, 90.0, 100.0).curve("test_accuracy")
    assert curve is not None
    assert curve.points[0] == (1, pytest.approx(9.5))
    assert curve.band[-1] == (4, pytest.approx(90.0), pytest.approx(100.0))
    assert variant_of(DENSE, 90.0).curve("nothing") is None


def test_runs_that_were_evaluated_at_other_epochs_begin_where_all_of_them_have() -> None:
    often, seldom = (image_result(DENSE, seed, 90.0) for seed in (0, 1))
    often["history"] = [{"epoch": epoch, "test_accuracy": 10.0 * epoch} for epoch in (1, 2, 3, 4, 5, 6)]
    seldom["history"] = [{"epoch": epoch, "test_accuracy": 10.0 * epoch} for epoch in (2, 4, 6)]
    curve = group_runs([run_of(often), run_of(seldom)])[0].curve("test_accuracy")
    assert curve is not None
    assert curve.points == [(epoch, pytest.approx(10.0 * epoch)) for epoch in (2, 3, 4, 5, 6)]
