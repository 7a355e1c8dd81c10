"""The two GPU kernels of Frobenius decay: Gram matrices of many factors, and the factors times those of their partners.

A factor is read in place, by its address. A program handles a tile of its rows. A factor's Gram matrix is stored as one
sum per tile; its readers add the tiles up in a fixed order, so that results do not vary from run to run. Each matrix
product is three in tf32, which keeps the precision of float32 and runs on tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def gram_kernel(
    tiles,  # (tiles, 2): factor, first row
    factors,  # (factors, 8): address, rows, rank, its two strides, where its results begin, its partner's first tile
    # and how many tiles that has
    sums,  # (tiles, R, R), written
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
):
    """Write the Gram matrix of every tile."""
    tile = tl.program_id(0)
    part = _load_tile(tiles, factors, tile, DTYPE, ROWS, R)
    k = tl.arange(0, R)
    gram = tl.dot(tl.trans(part), part, input_precision="tf32x3")
    tl.store(sums + tile * R * R + k[:, None] * R + k[None, :], gram)


@triton.jit
def product_kernel(
    tiles,  # (tiles, 2)
    factors,  # (factors, 8)
    sums,  # (tiles, R, R)
    results,  # all gradients, one factor after the other, written
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
):
    """Write every tile times the Gram matrix of its factor's partner."""
    tile = tl.program_id(0)
    own = factors + 8 * tl.load(tiles + 2 * tile)
    rows, rank, begin = tl.load(own + 1), tl.load(own + 2), tl.load(own + 5)
    partner, count = tl.load(own + 6), tl.load(own + 7)
    k = tl.arange(0, R)
    gram = tl.zeros((R, R), dtype=tl.float32)
    for other in range(partner, partner + count):
        gram += tl.load(sums + other * R * R + k[:, None] * R + k[None, :])
    part = _load_tile(tiles, factors, tile, DTYPE, ROWS, R)
    i = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    place = results + begin + i[:, None] * rank + k[None, :]
    product = tl.dot(part, gram, input_precision="tf32x3")
    tl.store(place, product, mask=(i[:, None] < rows) & (k[None, :] < rank))


@triton.jit
def _load_tile(tiles, factors, tile, DTYPE: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr):
    own = factors + 8 * tl.load(tiles + 2 * tile)
    source = tl.load(own).to(tl.pointer_type(DTYPE))
    rows, rank = tl.load(own + 1), tl.load(own + 2)
    down, across = tl.load(own + 3), tl.load(own + 4)
    i = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    k = tl.arange(0, R)
    inside = (i[:, None] < rows) & (k[None, :] < rank)
    return tl.load(source + i[:, None] * down + k[None, :] * across, mask=inside, other=0.0).to(tl.float32)
