"""The two GPU kernels of Frobenius decay: Gram matrices of many factors, and the factors times those of their partners.

Factors and targets are read in place, by their addresses. Matrices are cut into square blocks, so that one launch takes
factors of any ranks. A factor's Gram matrix is stored as one sum for every span of its rows. Readers add these up in a
fixed order, so that results do not vary from run to run. Each matrix product is three in tf32, which keeps the
precision of float32 and runs on tensor cores.

Kernels are built ``BY_ROWS`` where the columns of all matrices are next to each other. Triton then lets the threads of
a warp read along rows. Where it does not know the stride, they read down columns, and the decay takes 1.2 to 1.4 times
as long.

The table ``factors`` has nine columns: address, rows, rank, two strides, two strides of the target, where the partner's
sums begin and how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def odd(address: int) -> int:
    """Return an address as the kernel takes it: Triton would build a new one for every pattern of multiples of 16."""
    return 2 * address + 1


@triton.jit
def gram_kernel(
    blocks,  # (programs, 6): factor, first row, row after the last, first columns of both sides, where the sum begins
    factors,  # (factors, 9)
    sums,  # written
    places,  # (factors,), written for the other kernel
    coefficients,  # (factors,), written for the other kernel
    targets,  # ``odd`` addresses, one per factor: arguments, which a captured graph repeats, where a table may change
    numbers,  # one per factor
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROWS: tl.constexpr,
):
    """Write a block of a Gram matrix, on or above the diagonal, and its mirror image."""
    if tl.program_id(0) == 0:
        for f in tl.static_range(len(targets)):
            tl.store(places + f, targets[f] >> 1)
            tl.store(coefficients + f, numbers[f])
    own = blocks + 6 * tl.program_id(0)
    factor = factors + 9 * tl.load(own)
    first, last = _size(own + 1), _size(own + 2)
    left, right, begin = _size(own + 3), _size(own + 4), tl.load(own + 5)
    source, rank = tl.load(factor).to(tl.pointer_type(DTYPE)), _size(factor + 2)
    down, across = _size(factor + 3), _across(factor + 4, BY_ROWS)
    gram = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for row in range(first, last, ROWS):
        a = _load_block(source, row, left, last, rank, down, across, ROWS, BLOCK)
        b = _load_block(source, row, right, last, rank, down, across, ROWS, BLOCK)
        gram = tl.dot(tl.trans(a), b, gram, input_precision="tf32x3")
    pitch = tl.cdiv(rank, BLOCK) * BLOCK
    i, j = left + tl.arange(0, BLOCK), right + tl.arange(0, BLOCK)
    tl.store(sums + begin + i[:, None] * pitch + j[None, :], gram)
    if left < right:
        tl.store(sums + begin + j[None, :] * pitch + i[:, None], gram)


@triton.jit
def product_kernel(
    tiles,  # (programs, 3): factor, first row, first column
    factors,  # (factors, 9)
    sums,
    places,  # (factors,): addresses of targets
    coefficients,  # (factors,)
    scales,  # (factors,): by which coefficients are multiplied
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROWS: tl.constexpr,
):
    """Add a tile of a factor's product with its partner's Gram matrix to the target, unless its coefficient is zero.

    A program reads whole rows while others write parts of them, so factor and target must not share memory.
    """
    own = tiles + 3 * tl.program_id(0)
    f, row, column = tl.load(own), _size(own + 1), _size(own + 2)
    coefficient = tl.load(coefficients + f) * tl.load(scales + f)
    if coefficient != 0.0:
        factor = factors + 9 * f
        source, rows, rank = tl.load(factor).to(tl.pointer_type(DTYPE)), _size(factor + 1), _size(factor + 2)
        down, across = _size(factor + 3), _across(factor + 4, BY_ROWS)
        begin, count = tl.load(factor + 7), _size(factor + 8)
        pitch = tl.cdiv(rank, BLOCK) * BLOCK
        i, j, k = row + tl.arange(0, ROWS), column + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
        product = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for middle in range(0, rank, BLOCK):
            part = _load_block(source, row, middle, rows, rank, down, across, ROWS, BLOCK)
            place = sums + begin + (middle + k[:, None]) * pitch + j[None, :]
            known = (middle + k[:, None] < rank) & (j[None, :] < rank)  # the rest are zeros, which need not be read
            gram = tl.load(place, mask=known, other=0.0)
            for span in range(1, count):
                gram += tl.load(place + span * pitch * pitch, mask=known, other=0.0)
            product = tl.dot(part, gram, product, input_precision="tf32x3")
        target = tl.load(places + f).to(tl.pointer_type(DTYPE))
        target += i[:, None] * _size(factor + 5) + j[None, :] * _across(factor + 6, BY_ROWS)
        inside = (i[:, None] < rows) & (j[None, :] < rank)
        old = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, (old + coefficient * product).to(DTYPE), mask=inside)


@triton.jit
def _size(place):
    return tl.load(place).to(tl.int32)  # what is computed in 64 bits takes twice the registers


@triton.jit
def _across(place, BY_ROWS: tl.constexpr):
    return 1 if BY_ROWS else _size(place)


@triton.jit
def _load_block(source, row, column, rows, rank, down, across, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i, j = row + tl.arange(0, ROWS), column + tl.arange(0, BLOCK)
    inside = (i[:, None] < rows) & (j[None, :] < rank)
    return tl.load(source + i[:, None] * down + j[None, :] * across, mask=inside, other=0.0).to(tl.float32)
