"""Multiply a few rows by a matrix with one GPU kernel, as in decoding several sequences at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from factorized._torch import processors

FEWEST = 2  # rows for which the kernel is used
MOST = 0  # and most rows, of up to eight; 0: it is never used, as it has not been timed on a GPU yet
PROGRAMS = 2  # on each multiprocessor
WARPS = 8
REGISTERS = 128  # of a thread, so that none is spilled and so many programs fit
LOADS = 8  # of 16 bytes, by which a thread reads a block of the matrix
TALLEST = 2  # times eight outputs are most of a tile, one or two
ROWS = 8  # of a piece of the matrix, as in the kernel
DEPTH = 32  # inputs of a piece for each warp, as there


def fits(rows: int, begins: Sequence[int], *, added_last: bool) -> bool:
    """Return whether the kernel can multiply so many rows by a matrix.

    Args:
        rows: of x.
        begins: outputs at which its parts but the first begin.
        added_last: whether a residual is added to what a norm or a gate has scaled; the kernel begins with it.
    """
    return FEWEST <= rows <= MOST and all(begin % ROWS == 0 for begin in begins) and not added_last


@torch.library.custom_op("factorized::multiply_rows", mutates_args=())
def multiply_rows(
    x: Tensor,  # (rows, width)
    weight: Tensor,  # contiguous
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    below: Sequence[int],  # where the outputs of each part of x but the first begin
    beside: Sequence[int],  # where each part of x but the first begins
) -> Tensor:
    """Do what ``multiply`` does by the kernel."""
    from factorized.nn.few_rows_kernel import few_rows_kernel

    x, cuda = x.contiguous(), x.is_cuda
    outputs, inputs = len(weight) // (2 if gated else 1), weight.shape[1]
    y = x.new_empty(len(x), outputs)
    multiprocessors = processors(x.device) if cuda else 2
    tall, wide = block_sizes(outputs, inputs, [] if gated else below, multiprocessors)
    settings = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True} if cuda else {}
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        few_rows_kernel[(min(PROGRAMS * multiprocessors, math.ceil(outputs / (tall * ROWS))),)](
            x,
            weight,
            x if norm is None else norm,
            x if residual is None else residual.contiguous(),
            y,
            eps,
            len(x),
            *(x.shape[1], inputs, outputs, *(*below, outputs, outputs)[:2], *(*beside, 0, 0)[:2]),
            *(norm is not None, residual is not None, int(gated), tall, wide, WARPS),
            EARLY=cuda,
            **settings,
        )
    return y


@multiply_rows.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    below: Sequence[int],
    beside: Sequence[int],
) -> Tensor:
    return x.new_empty(len(x), len(weight) // (2 if gated else 1))


def block_sizes(outputs: int, inputs: int, begins: Sequence[int], multiprocessors: int) -> tuple[int, int]:
    """Return how many pieces of the matrix are below one another in a tile, and how many side by side are a block.

    The busiest multiprocessor reads the least, of the matrix and of x, which every tile reads. No tile has outputs of
    two parts, which begin at ``begins``.
    """
    found = []
    for tall in range(TALLEST, 0, -1):
        if all(begin % (tall * ROWS) == 0 for begin in begins):
            found.append((math.ceil(math.ceil(outputs / (tall * ROWS)) / multiprocessors) * (tall + 1), tall))
    tall = min(found, key=lambda pair: pair[0])[1]
    pieces = math.ceil(inputs / (DEPTH * WARPS))
    return tall, math.ceil(pieces / math.ceil(pieces * tall / LOADS))
