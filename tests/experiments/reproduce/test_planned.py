"""Planning: what is finished is found again, a changed recipe is another run, and what is needed comes first."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from factorized.experiments.recipes.find import load_any_recipe, load_recipe
from factorized.experiments.recipes.shorten import shorten
from factorized.experiments.reproduce.job import Job, run_job
from factorized.experiments.reproduce.planned import PlannedRun, Planner, check_length, in_waves
from tests.experiments.reproduce.small_table import TABLE, jobs, planner, runs_in

DENSE, LOW_RANK = "small/digits", "small/digits-fd"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run: one epoch of the dense network, seed 0."""
    folder = tmp_path_factory.mktemp("finished")
    outcome = run_job(jobs(folder, length=1)[0], "cpu")
    assert outcome.error is None
    return folder


def planned(folder: Path, name: str = DENSE, seed: int = 0, length: int | None = 1, text: str = TABLE) -> PlannedRun:
    plan = planner(folder, length=length, text=text)
    return plan.plan(plan.own[name], seed)


def test_a_finished_run_is_found_and_others_are_to_do(finished: Path) -> None:
    run = planned(finished)
    assert run.finished is not None
    assert run.place == run.finished.path.parent == run.folder
    assert not run.is_to_do
    assert planned(finished, seed=1).is_to_do
    assert planned(finished, LOW_RANK).is_to_do


@pytest.mark.parametrize(
    ("text", "length"),
    [(TABLE, 2), (TABLE, None), (TABLE.replace("batch = 256", "batch = 128"), 1)],
)
def test_a_changed_recipe_is_a_new_run_in_another_folder(finished: Path, text: str, length: int | None) -> None:
    run = planned(finished, length=length, text=text)
    assert run.is_to_do
    assert run.folder != planned(finished).folder


def test_a_run_on_other_data_does_not_count(finished: Path) -> None:
    plan = planner(finished, length=1)
    (run,) = plan.finished
    other = {**run.result, "data": {**run.result["data"], "checksum": "0"}}
    plan = plan.again([replace(run, result=other)])
    assert plan.plan(plan.own[DENSE], 0).is_to_do


def test_a_result_without_its_network_counts_where_nothing_goes_on_from_it(finished: Path, tmp_path: Path) -> None:
    (run,) = runs_in(finished / "out")
    (tmp_path / "results").mkdir()
    shutil.copy(run.path, tmp_path / "results/seed-0.json")
    found = planned(tmp_path)
    assert found.finished is not None
    assert found.place == found.folder  # where the network would be
    assert found.folder.is_relative_to(tmp_path / "out")


def test_of_two_finished_runs_the_one_whose_network_is_there_counts(finished: Path) -> None:
    plan = planner(finished, length=1)
    (run,) = plan.finished
    plan = plan.again([replace(run, path=Path("results/seed-0.json")), run])
    assert plan.plan(plan.own[DENSE], 0).finished is run


def test_seeds_of_a_recipe_are_one_job_without_those_that_are_finished(finished: Path) -> None:
    dense, low_rank = jobs(finished, seeds=3, length=1)
    assert (dense.name, dense.seeds) == (DENSE, (1, 2))
    assert (low_rank.name, low_rank.seeds) == (LOW_RANK, (0, 1, 2))
    assert [job.seeds for job in low_rank.by_seed()] == [(0,), (1,), (2,)]
    assert json.loads(json.dumps(dense.recipe)) == dense.recipe  # plain data


def test_missing_data_are_the_problem_of_their_runs_alone(tmp_path: Path) -> None:
    text = TABLE.replace('"digits", crop', '"nowhere", crop')
    run = planned(tmp_path, text=text)
    assert run.problem is not None
    assert "'nowhere' is neither a file or folder nor one of" in run.problem
    assert not run.is_to_do
    assert in_waves([run], None) == []


def test_without_data_finished_runs_count_if_all_were_trained_on_the_same(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(recipe: object, data: object) -> str:
        raise ValueError("the data are gone")

    monkeypatch.setattr("factorized.experiments.reproduce.planned.data_checksum", gone)
    run = planned(finished)
    assert (run.finished is not None, run.problem) == (True, None)
    assert planned(finished, seed=1).problem == "the data are gone"
    assert planned(finished, length=2).problem == "the data are gone"  # another recipe
    plan = planner(finished, length=1)
    (known,) = plan.finished
    other = {**known.result, "seed": 1, "data": {**known.result["data"], "checksum": "0"}}
    plan = plan.again([known, replace(known, result=other)])
    assert plan.plan(plan.own[DENSE], 0).problem == "the data are gone"


NORMALIZED = (
    TABLE
    + """
[[grid]]
name = "small/other"
title = "Follows the norms of another run"
columns = ["fd"]
settings.decay = { kind = "normalized", norms = "out/small/digits-fd/seed-{{seed}}" }
rows = { all = "*" }
"""
)
# columns are merged over grids, and this one sets the decay
NORMALIZED = NORMALIZED.replace('decay.kind = "frobenius" }', "decay.record_norms = true }").replace(
    '"normalized", norms', '"normalized", record_norms = false, norms'
)


def test_a_run_that_goes_on_from_another_comes_after_it(tmp_path: Path) -> None:
    plan = planner(tmp_path, length=1, text=NORMALIZED)
    follower = plan.plan(plan.own["small/other-fd"], 1)
    (needed,) = follower.needs
    assert (needed.name, needed.seed) == (LOW_RANK, 1)
    assert str(needed.folder) in follower.recipe.to_dict()["decay"]["norms"]
    first, second = in_waves([follower, follower], None)
    assert [job.name for job in first] == [LOW_RANK]
    assert [job.name for job in second] == ["small/other-fd"]
    for job in (*first, *second):
        assert run_job(job, "cpu").error is None
    plan = planner(tmp_path, length=1, text=NORMALIZED)
    assert plan.plan(plan.own["small/other-fd"], 1).finished is not None


def test_a_run_that_goes_on_from_itself_is_refused(tmp_path: Path) -> None:
    text = NORMALIZED.replace("out/small/digits-fd/", "out/small/other-fd/")
    plan = planner(tmp_path, text=text)
    with pytest.raises(ValueError, match="small/other-fd continues from itself, by way of small/other-fd"):
        plan.plan(plan.own["small/other-fd"], 0)


def test_a_run_whose_network_is_lost_is_trained_again_for_one_that_goes_on_from_it(tmp_path: Path) -> None:
    plan = planner(tmp_path, length=1, text=NORMALIZED)
    (first,), _ = in_waves([plan.plan(plan.own["small/other-fd"], 0)], None)
    assert run_job(first, "cpu").error is None
    (tmp_path / "results").mkdir()
    shutil.copy(Path(first.folder) / "seed-0/result.json", tmp_path / "results/mine.json")
    shutil.rmtree(tmp_path / "out")
    plan = planner(tmp_path, length=1, text=NORMALIZED)
    assert plan.plan(plan.own[LOW_RANK], 0).finished is not None
    waves = in_waves([plan.plan(plan.own["small/other-fd"], 0)], None)
    assert [[job.name for job in jobs] for jobs in waves] == [[LOW_RANK], ["small/other-fd"]]


def test_fine_tuning_plans_both_phases_of_its_pre_training_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factorized.experiments.reproduce.planned.data_checksum", lambda recipe, data: recipe.task)
    plan = Planner(tmp_path, None, [], length=2)
    run = plan.plan(load_any_recipe("squad/bert-base-0.5-flambe"), 2)
    waves = in_waves([run], None)
    expected = ["bert/base-0.5-flambe", "bert/base-0.5-flambe-phase2", "squad/bert-base-0.5-flambe"]
    assert [[job.name for job in jobs] for jobs in waves] == [[name] for name in expected]
    assert all(job.seeds == (2,) for jobs in waves for job in jobs)
    assert waves[2][0].recipe["model"]["from_run"] == f"{waves[1][0].folder}/seed-2"
    assert {job.recipe["shortened_from"] for jobs in waves for job in jobs} == {7038, 1563, 5530}


def test_a_length_in_the_wrong_unit_names_the_right_option() -> None:
    images, text = load_recipe("cifar10/resnet32"), load_any_recipe("translation/numbers")
    assert check_length([images], 5, None) == 5
    assert check_length([text], None, 6) == 6
    assert check_length([text, images], None, None) is None
    with pytest.raises(ValueError, match="--epochs 5: translation/numbers has 600 updates; shorten it by --updates"):
        check_length([text], 5, None)
    with pytest.raises(ValueError, match="--updates 5: cifar10/resnet32 has 200 epochs; shorten it by --epochs"):
        check_length([images], None, 5)


@pytest.mark.parametrize("name", ["digits/resnet8", "translation/numbers"])
def test_a_job_on_data_it_was_not_planned_for_is_an_error(tmp_path: Path, name: str) -> None:
    recipe = shorten(load_any_recipe(name), 1)
    outcome = run_job(Job(recipe.to_dict(), (0,), str(tmp_path), None, "0" * 64), "cpu")
    assert outcome.error is not None
    assert "planned for data with checksum 000000000000…, and those here have" in outcome.error
