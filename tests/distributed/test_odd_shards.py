"""Shards that are uneven or empty, half types, other penalties and diagnostics, in two processes against one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_many_processes import run


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = run("odd", tmp_path_factory.mktemp("odd"), "tests/distributed/odd_worker.py")["odd"]
    return result


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "flambe"])
@pytest.mark.parametrize("parts", ["trained", "frozen"])
def test_uneven_and_empty_shards_end_where_one_process_does(odd: dict[str, Any], parts: str, optimizer: str) -> None:
    assert odd[f"{parts} {optimizer}"] < 1e-12


@pytest.mark.parametrize("penalty", ["frobenius", "nuclear", "product"])
def test_a_penalty_acts_on_the_whole_product_before_a_step_and_in_a_loss(odd: dict[str, Any], penalty: str) -> None:
    assert odd[f"trained {penalty}"] < 1e-12
    assert odd[f"in the loss {penalty}"] < 1e-12


def test_half_factors_get_the_decay_of_one_process_to_the_last_bit_but_one(odd: dict[str, Any]) -> None:
    assert odd["half"] < 1e-3


def test_sharded_factors_of_several_types_get_the_decay_of_one_process(odd: dict[str, Any]) -> None:
    assert odd["mixed types"] < 1e-3


def test_mixed_precision_trains_as_single_precision_does_within_its_digits(odd: dict[str, Any]) -> None:
    assert 0 < odd["mixed precision"] < 5e-3


def test_norms_are_matched_and_products_diagnosed_as_in_one_process(odd: dict[str, Any]) -> None:
    assert odd["matched"] < 1e-12
    assert odd["diagnosed alike"]


def test_compression_rates_are_those_of_whole_factors(odd: dict[str, Any]) -> None:
    assert odd["scaled alike"]


def test_lamb_takes_weights_that_are_sharded_by_columns(odd: dict[str, Any]) -> None:
    assert odd["by columns"] < 1e-12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("set weight", "sharded over processes and cannot be set as a whole; do this before fully_shard"),
        ("load dense", "load before fully_shard. Nothing was changed"),
        ("load", "loading needs whole weights; load before fully_shard. Nothing was changed"),
        ("compose", "call fz.save, which gathers"),
        ("lower", "call fz.save, which gathers"),
        ("load dense after an evaluation", "load before fully_shard. Nothing was changed"),
        ("truncate after an evaluation", "truncate before fully_shard. Nothing was changed"),
        ("compose after an evaluation", "call fz.save, which gathers"),
        ("partly sharded", "0.U is not sharded, but 0.V, a factor of the same product, is"),
    ],
)
def test_what_needs_whole_factors_says_what_to_do_instead(odd: dict[str, Any], call: str, message: str) -> None:
    assert message in odd[call]
