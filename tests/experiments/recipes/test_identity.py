"""Fingerprints: another run has another one, and the same run on another machine has not."""

from __future__ import annotations

from typing import Any

import pytest

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.identity import deciding, fingerprint
from factorized.experiments.recipes.shorten import shorten

NAME = "cifar10/resnet32x2-lowrank-0.1-si-fd"


def print_of(*changes: str, checksum: str = "0", name: str = NAME) -> str:
    return fingerprint(load_any_recipe(name, changes), checksum)


@pytest.mark.parametrize(
    "change",
    ["schedule.epochs=199", "optimizer.lr=0.2", "factorize.ratio=0.11", "run.batch=64", "data.flip=false"],
)
def test_a_change_that_decides_a_run_changes_its_fingerprint(change: str) -> None:
    assert print_of(change) != print_of()


def test_other_data_and_a_shortened_recipe_have_another_fingerprint() -> None:
    assert print_of(checksum="1") != print_of()
    assert fingerprint(shorten(load_any_recipe(NAME), 3), "0") != print_of("schedule.epochs=3")


@pytest.mark.parametrize(
    "change",
    ["run.checkpoint_every=7", "run.compile=no", "data.place=loader", "data.name=mine", "factorize.attention=heads"],
)
def test_what_does_not_decide_a_run_leaves_its_fingerprint(change: str) -> None:
    assert print_of(change) == print_of()


def test_a_result_of_a_version_with_fewer_fields_is_read_with_the_defaults_of_the_others() -> None:
    table: dict[str, Any] = load_any_recipe(NAME).to_dict()
    for field in ("min_size", "of", "multiple_of", "blocks"):
        del table["factorize"][field]
    assert fingerprint(table, "0") == print_of()
    table["factorize"]["gone"] = 3  # a field that this version does not have
    assert fingerprint(table, "0") != print_of()


def test_fields_of_factorize_that_a_dense_network_has_no_use_for_do_not_count() -> None:
    dense = load_any_recipe("cifar10/resnet32x2").to_dict()
    older = {**dense, "factorize": {**dense["factorize"], "attention": False}}  # was the default
    assert fingerprint(older, "0") == fingerprint(dense, "0") != print_of()


def test_the_folder_of_another_run_counts_by_its_last_parts() -> None:
    here, there, other = (
        print_of(f"model.from_run={folder}/seed-0", name="squad/bert-small")
        for folder in ("/tmp/a/bert/small-12345678", "b/bert/small-12345678", "b/bert/small-87654321")
    )
    assert here == there != other


def test_text_is_known_by_its_checksum_and_not_by_its_files() -> None:
    change = 'data.train=["other.tsv"]'
    assert print_of(change, name="translation/iwslt14") == print_of(name="translation/iwslt14")
    assert "train" not in deciding(load_any_recipe("translation/iwslt14"))["data"]
