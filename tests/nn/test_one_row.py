"""A few rows times a matrix: what plain torch computes and, in Triton's interpreter, the kernel for one row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from factorized.nn import one_row
from factorized.nn.one_row import multiply, tile_sizes
from tests.interpreted import needs_interpreter, run_interpreted

INTERPRETED = """
import torch
from tests.nn.test_one_row import check_feed_forward, check_parts
for dtype, most in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
    check_feed_forward(1, 96, 40, 176, dtype, most)
    check_feed_forward(1, 2100, 24, 560, dtype, most)
    check_parts(1, 136, [(64, 40), (32, 16), (32, 24)], dtype, most)
    check_parts(1, 72, [(48, 700), (97, 24)], dtype, most)
    check_parts(1, 72, [(56, 40), (56, 64)], dtype, most, gated=True)
    check_parts(1, 320, [(250, 64)], dtype, most)
"""


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)


def check_feed_forward(rows: int, width: int, rank: int, hidden: int, dtype: torch.dtype, most: float) -> None:
    """Compare a gated feed-forward block, with norm and residual, to float64."""
    torch.manual_seed(0)
    norm = (torch.rand(width) + 0.5).to(dtype)
    first, second = draw(2 * rank, width, dtype=dtype), draw(2 * hidden, rank, dtype=dtype)
    down_first, down_second = draw(rank, hidden, dtype=dtype), draw(width, rank, dtype=dtype)
    x = torch.randn(rows, width).to(dtype)  # last: the kernel before the first product must write no matrix
    thin = multiply(x, first, norm=norm, eps=1e-5)
    middle = multiply(thin, second, gated=True, parts=[(hidden, rank)] * 2)
    y = multiply(multiply(middle, down_first), down_second, residual=x)
    wanted = F.rms_norm(x.double(), (width,), norm.double(), 1e-5) @ first.double().mT
    gate, up = (part @ half.double().mT for part, half in zip(wanted.chunk(2, -1), second.chunk(2), strict=True))
    close(y, x.double() + F.silu(gate) * up @ down_first.double().mT @ down_second.double().mT, most)


def check_parts(
    rows: int, width: int, parts: list[tuple[int, int]], dtype: torch.dtype, most: float, gated: bool = False
) -> None:
    """Compare low-rank layers of one input, given by their outputs and ranks, to float64."""
    torch.manual_seed(0)
    widest = max(rank for _, rank in parts)
    firsts = [draw(rank, width, dtype=dtype) for _, rank in parts]
    seconds = [draw(outputs, rank, dtype=dtype) for outputs, rank in parts]
    padded = torch.cat([F.pad(second, (0, widest - second.shape[1])) for second in seconds])
    stacked, x = torch.cat(firsts), torch.randn(rows, width).to(dtype)
    y = multiply(multiply(x, stacked), padded, parts=parts, gated=gated)
    wanted = [x.double() @ (second.double() @ first.double()).mT for first, second in zip(firsts, seconds, strict=True)]
    close(y, F.silu(wanted[0]) * wanted[1] if gated else torch.cat(wanted, -1), most)


def close(actual: Tensor, wanted: Tensor, most: float) -> None:
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted).norm() < most * wanted.norm()


@pytest.mark.parametrize("rows", [1, 20])
def test_products_make_a_gated_feed_forward_block_with_norm_and_residual(rows: int) -> None:
    check_feed_forward(rows, 96, 40, 176, torch.float32, 1e-6)


@pytest.mark.parametrize("parts", [[(64, 40)], [(48, 40), (97, 8)], [(64, 40), (32, 16), (32, 24)]])
def test_layers_of_one_input_have_parts_of_the_thin_tensor(parts: list[tuple[int, int]]) -> None:
    check_parts(3, 136, parts, torch.float32, 1e-6)


def test_gate_and_values_may_differ_in_rank() -> None:
    check_parts(3, 72, [(56, 40), (56, 64)], torch.float32, 1e-6, gated=True)


def test_a_gate_and_values_of_one_input_need_no_parts() -> None:
    x, weight = torch.randn(2, 8), torch.randn(12, 8)
    gate, up = (x @ weight.mT).chunk(2, -1)
    torch.testing.assert_close(multiply(x, weight, gated=True), F.silu(gate) * up)


@pytest.mark.parametrize("of", ["x", "weight", "norm", "residual"])
def test_where_a_gradient_is_needed_torch_computes(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "INTERPRETED", True)  # as if there were a kernel
    sizes = {"x": (1, 8), "weight": (4, 8), "norm": (8,), "residual": (1, 4)}
    given = {name: torch.randn(size, requires_grad=name == of) for name, size in sizes.items()}
    multiply(**given).sum().backward()
    assert given[of].grad is not None


def test_a_matrix_that_would_be_copied_first_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "INTERPRETED", True)  # as if there were a kernel
    monkeypatch.setattr(one_row, "multiply_row", None)
    x, weight = torch.randn(1, 8), torch.randn(8, 4).mT
    torch.testing.assert_close(multiply(x, weight), x @ weight.mT)


@pytest.mark.parametrize(
    ("outputs", "inputs", "begins", "sizes"),
    [
        (6144, 592, [2048, 4096], (4, 1024)),
        (6145, 592, [2049, 4097], (1, 1024)),
        (592, 5632, [], (1, 2048)),
        (64, 24, [32], (2, 32)),
    ],
)
def test_tiles_are_large_but_keep_all_programs_busy_and_parts_apart(
    outputs: int, inputs: int, begins: list[int], sizes: tuple[int, int]
) -> None:
    assert tile_sizes(outputs, inputs, begins, 1056 if outputs > 64 else 32) == sizes


@pytest.mark.nightly
@needs_interpreter
def test_the_interpreted_kernel_computes_the_same() -> None:
    run_interpreted(INTERPRETED)
