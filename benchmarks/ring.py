"""Products of a row with matrices by ``ring_kernel.py``, in the place of the library's kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from factorized.nn.one_row import _processors

RING = 12_288  # bytes of shared memory into which a program reads ahead
PROGRAMS = 8  # on each multiprocessor
WARPS = 1
BUFFERS = 8  # most that a ring consists of
VECTORS = 8  # of eight elements, most that a thread holds of a block in the ring
OVERHEAD = 16  # elements that a thread could process in place of each turn of the ring


@torch.library.custom_op("factorized_benchmarks::multiply_row_by_ring", mutates_args=())
def multiply_row(
    x: Tensor,  # (1, width)
    weight: Tensor,  # contiguous
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    below: Sequence[int],  # where the outputs of each part of x but the first begin
    beside: Sequence[int],  # where each part of x but the first begins
) -> Tensor:
    """Do what ``factorized.nn.one_row.multiply_row`` does."""
    from benchmarks.ring_kernel import LINE, ring_kernel

    x, cuda = x.contiguous(), x.is_cuda
    outputs, inputs = len(weight) // (2 if gated else 1), weight.shape[1]
    y = x.new_empty(1, outputs)
    programs = PROGRAMS * _processors(x.device) if cuda else 2
    tile, block, tiles, buffers = ring_sizes(outputs, inputs, [] if gated else below, programs, 2 if gated else 1)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        ring_kernel[(math.ceil(math.ceil(outputs / tile) / tiles),)](
            x,
            weight,
            x if norm is None else norm,
            x if residual is None else residual.contiguous(),
            y,
            eps,
            *(x.shape[1], inputs, outputs, *(*below, outputs, outputs)[:2], *(*beside, 0, 0)[:2]),
            *(norm is not None, residual is not None, int(gated), tile, block),
            EARLY=cuda,
            TILES=tiles,
            LINES=2 ** (math.ceil(x.shape[1] / LINE.value) - 1).bit_length(),
            BUFFERS=buffers,
            **({"num_warps": WARPS, "launch_pdl": True} if cuda else {}),
        )
    return y


@multiply_row.register_fake
def _(x: Tensor, weight: Tensor, norm: object, eps: float, residual: object, gated: bool, *_: object) -> Tensor:
    return x.new_empty(1, len(weight) // (2 if gated else 1))


def ring_sizes(
    outputs: int, inputs: int, begins: Sequence[int], programs: int, matrices: int
) -> tuple[int, int, int, int]:
    """Return the outputs and inputs of a tile, the tiles of each program and the buffers of its ring.

    The slowest program has the least to do. No tile has outputs of two parts, which begin at ``begins``.
    """
    widest = 2 ** (inputs - 1).bit_length()
    block = min(widest, 256)  # which one warp reads at once
    most = min(VECTORS * 8 * 32 * WARPS // matrices, RING // (2 * 2 * matrices))  # at least two buffers
    found: list[tuple[int, int, int, int, int]] = []
    while not found or block <= min(widest, most):
        size = 1
        while size == 1 or size * block <= most:
            if all(begin % size == 0 for begin in begins):
                tiles = math.ceil(math.ceil(outputs / size) / programs)
                turns = tiles * math.ceil(inputs / block)
                buffers = max(1, min(RING // (2 * matrices * size * block), BUFFERS, turns))
                cost = turns * (size * block * matrices + OVERHEAD * 32 * WARPS)
                found.append((cost, -size, block, tiles, buffers))
            size *= 2
        block *= 2
    _, size, block, tiles, buffers = min(found)
    return -size, block, tiles, buffers
