"""Medians, spreads, rounds and fitted exponents."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from factorized.experiments.bench import measure
from factorized.experiments.bench.measure import Spread, clock_of, fit_exponent, interleave

CPU = torch.device("cpu")


def test_a_spread_has_the_median_and_both_ends() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 100.0])
    assert spread.to_dict() == {"median": 2.5, "least": 1.0, "largest": 100.0, "rounds": 4}
    assert Spread.of([1.23456789]).median == 1.235


@pytest.mark.parametrize(
    ("sizes", "values", "exponent"),
    [
        ([1, 2, 4, 8], [3, 6, 12, 24], 1),
        ([1, 2, 4, 8], [5, 20, 80, 320], 2),
        ([1, 2, 4], [8, 4, 2], -1),
        ([10, 20, 40], [7, 7, 7], 0),
        ([4, 1, 2], [16, 1, 4], 2),  # in any order
        ([1, 10, 100], [1, 20, 100], 1),  # least squares: the middle one is off and does not tilt the line
    ],
)
def test_exponents_of_powers_are_found(sizes: list[int], values: list[float], exponent: float) -> None:
    assert fit_exponent(sizes, values) == pytest.approx(exponent)


@pytest.mark.parametrize(("sizes", "values"), [([2, 2], [1, 3]), ([1], [1]), ([1, 2], [0, 1]), ([1, 2], [1, 2, 3])])
def test_what_has_no_exponent_is_refused(sizes: list[int], values: list[float]) -> None:
    with pytest.raises(ValueError, match="two or more different sizes"):
        fit_exponent(sizes, values)


def calls(order: list[str], name: str, seconds: float = 0.0) -> Callable[[], None]:
    def run() -> None:
        order.append(name)
        time.sleep(seconds)

    return run


def test_runs_take_turns() -> None:
    order: list[str] = []
    times = interleave({"a": calls(order, "a"), "b": calls(order, "b")}, CPU, seconds=0.01)
    assert times["a"].rounds == times["b"].rounds >= 3
    # from the second round on, each after an untimed one
    assert order == ["a", "b"] + ["a", "a", "b", "b"] * (times["a"].rounds - 1)


def test_long_runs_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SHORT", 0.0)
    order: list[str] = []
    rounds = interleave({"a": calls(order, "a"), "b": calls(order, "b")}, CPU, seconds=0.01)["a"].rounds
    assert order == ["a", "b"] * rounds


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-9, 1), (0.02, 3), (1000.0, measure.MOST_ROUNDS)])
def test_there_are_three_rounds_unless_they_would_take_far_too_long(seconds: float, rounds: int) -> None:
    slow = 0.02 if seconds < 1 else 0.0
    assert interleave({"a": calls([], "a", slow)}, CPU, seconds)["a"].rounds == rounds


def test_one_thread_is_timed_by_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, clock, least in ((1, "CPU time of one thread", 0.0), (2, "wall clock", 19.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert clock_of(CPU) == clock
        found = interleave({"asleep": calls([], "asleep", 0.02)}, CPU, seconds=0.01)["asleep"].median
        assert found >= least
        assert found < 19 or threads > 1
