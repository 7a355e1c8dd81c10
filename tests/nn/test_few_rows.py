"""A few rows times a matrix: what goes to the kernel, and what it computes in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from factorized.nn import few_rows, one_row
from factorized.nn.few_rows import block_sizes
from factorized.nn.one_row import multiply
from tests.interpreted import needs_interpreter, run_interpreted

# not bfloat16, of which the interpreter multiplies the bits
INTERPRETED = """
import torch
from unittest.mock import patch
from factorized.nn import few_rows, one_row
from tests.nn.test_one_row import check_feed_forward, check_parts
few_rows.MOST = 8
cases = [(2, {"WARPS": 8}), (5, {"WARPS": 4, "LOADS": 4}), (8, {"TALLEST": 1}), (1, {"FEWEST": 1})]
for rows, constants in cases:
    with patch.multiple(few_rows, **constants), patch.object(one_row, "multiply_row", None):
        for dtype, most in ((torch.float32, 1e-6), (torch.float16, 3e-3)):
            check_feed_forward(rows, 96, 19, 176, dtype, most)
            check_parts(rows, 136, [(64, 40), (32, 16), (24, 24)], dtype, most)
            check_parts(rows, 72, [(48, 700), (97, 24)], dtype, most)
            check_parts(rows, 72, [(57, 40), (57, 64)], dtype, most, gated=True)
check_feed_forward(3, 2100, 24, 560, torch.float32, 1e-6)
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the arguments of all calls of the kernel, and compute nothing."""
    seen: list[Any] = []
    monkeypatch.setattr(one_row, "INTERPRETED", True)  # as if there were kernels
    monkeypatch.setattr(few_rows, "MOST", 8)
    monkeypatch.setattr(few_rows, "multiply_rows", lambda *given: seen.append(given))
    return seen


@pytest.mark.parametrize(("rows", "times"), [(2, 1), (8, 1), (9, 0)])
def test_the_kernel_multiplies_up_to_eight_rows(rows: int, times: int, calls: list[Any]) -> None:
    multiply(torch.randn(rows, 8), torch.randn(16, 8))
    assert len(calls) == times


def test_it_is_off_until_a_gpu_has_timed_it(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert few_rows.MOST == 0
    multiply(torch.randn(2, 8), torch.randn(16, 8))
    assert not calls


@pytest.mark.parametrize(
    "how",
    [
        {"norm": torch.ones(8), "residual": torch.zeros(2, 16)},
        {"gated": True, "residual": torch.zeros(2, 8)},
        {"parts": [(9, 4), (7, 4)]},  # the second would begin within a piece
    ],
)
def test_what_it_cannot_compute_is_left_to_torch(how: dict[str, Any], calls: list[Any]) -> None:
    multiply(torch.randn(2, 8), torch.randn(16, 8), **how)
    assert not calls


def test_a_gate_and_values_may_have_any_number_of_outputs(calls: list[Any]) -> None:
    multiply(torch.randn(2, 8), torch.randn(18, 4), parts=[(9, 4), (9, 4)], gated=True)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("outputs", "inputs", "begins", "sizes"),
    [
        (1920, 2048, [], (2, 4)),
        (640, 2048, [], (1, 8)),  # few outputs: more tiles
        (6144, 640, [2048, 4096], (2, 3)),
        (6144, 640, [2056, 4096], (1, 3)),
        (640, 5632, [], (1, 8)),
        (16, 24, [], (2, 1)),
    ],
)
def test_tiles_are_such_that_no_multiprocessor_reads_much_more_than_others(
    outputs: int, inputs: int, begins: list[int], sizes: tuple[int, int]
) -> None:
    assert block_sizes(outputs, inputs, begins, 132 if outputs > 16 else 1) == sizes


@pytest.mark.nightly
@needs_interpreter
def test_the_interpreted_kernel_computes_the_same() -> None:
    run_interpreted(INTERPRETED)
