"""The GPU kernel that multiplies one row by a matrix, and starts while the kernel before it still runs.

No kernel writes the matrix: before a program waits for the kernel that writes the row, it reads its first block of the
matrix and asks the L2 cache for the others. Otherwise every small product would wait for memory by itself. All else is
read or written after the wait: for the kernel before, which is done only when those before it are.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_FETCHED = tl.constexpr(2**23)  # elements of a matrix, a fraction of the L2 cache
LINE = tl.constexpr(64)  # elements of two bytes in a line of that cache


@triton.jit
def row_kernel(
    x,  # (WIDTH,)
    weight,  # (OUT, IN); gated: (2 * OUT, IN)
    norm,  # (WIDTH,)
    residual,  # (OUT,)
    y,  # (OUT,), written
    eps,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OUT_1: tl.constexpr,  # where the outputs of the second part of x begin
    OUT_2: tl.constexpr,  # and of the third
    IN_1: tl.constexpr,  # where the second part of x begins
    IN_2: tl.constexpr,  # and the third
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # the kernels before and after may run at the same time
):
    """Write the row times a matrix, or the gated product of the row and two."""
    first = tl.program_id(0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    block = _block(weight, first * TILE, 0, IN, OUT, TILE, BLOCK)
    other = _block(weight + GATED * OUT * IN, first * TILE, 0, IN, OUT, TILE, BLOCK)
    if EARLY:
        for half in tl.static_range(1 + GATED):
            fetch(weight + half * OUT * IN, IN, OUT, min(OUT, MOST_FETCHED // (1 + GATED) // IN), IN, TILE, BLOCK)
        tl.extra.cuda.gdc_wait()
    # fmt: off
    _write(x, weight, norm, residual, y, eps, first, block, other, WIDTH, IN, OUT, OUT_1, OUT_2, IN_1, IN_2,
           NORM, RESIDUAL, GATED, TILE, BLOCK, True)
    for tile in range(first + tl.num_programs(0), tl.cdiv(OUT, TILE), tl.num_programs(0)):
        _write(x, weight, norm, residual, y, eps, tile, block, other, WIDTH, IN, OUT, OUT_1, OUT_2, IN_1, IN_2,
               NORM, RESIDUAL, GATED, TILE, BLOCK, False)
    # fmt: on


@triton.jit
def _write(
    x, weight, norm, residual, y, eps, tile, block, other,
    WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    OUT_1: tl.constexpr, OUT_2: tl.constexpr, IN_1: tl.constexpr, IN_2: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Write a tile of the outputs; ``READ`` if ``block`` and ``other``, the first of the tile, are read already."""
    begin = tile * TILE
    part, end = x, IN
    if OUT_1 < OUT and not GATED:
        offset = tl.where(begin >= OUT_2, IN_2, tl.where(begin >= OUT_1, IN_1, 0))
        part, end = x + offset, tl.minimum(IN, WIDTH - offset)
    value = _tile(part, end, weight, norm, eps, begin, block, IN, OUT, NORM, TILE, BLOCK, READ)
    if GATED:
        part, end, weight = x + IN_1, min(IN, WIDTH - IN_1), weight + OUT * IN
        values = _tile(part, end, weight, norm, eps, begin, other, IN, OUT, NORM, TILE, BLOCK, READ)
        value = value * tl.sigmoid(value) * values
    at = begin + tl.arange(0, TILE)
    if RESIDUAL:
        value += tl.load(residual + at, mask=at < OUT, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < OUT)


@triton.jit
def _tile(
    x, end, weight, norm, eps, begin, block,
    IN: tl.constexpr, OUT: tl.constexpr, NORM: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Return a tile of the outputs, (TILE,), from the elements of x up to ``end``."""
    total = tl.zeros((TILE, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    start = 0
    if READ:
        total, squares = _add(total, squares, block, x, end, norm, 0, NORM, BLOCK)
        start = BLOCK
    for at in tl.range(start, IN, BLOCK):
        block = _block(weight, begin, at, IN, OUT, TILE, BLOCK)
        total, squares = _add(total, squares, block, x, end, norm, at, NORM, BLOCK)
    value = tl.sum(total, 1)
    if NORM:
        value *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    return value


@triton.jit
def _add(total, squares, block, x, end, norm, at, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """Add the products with a block of the matrix, and the squares of the row."""
    k = at + tl.arange(0, BLOCK)
    row = tl.load(x + k, mask=k < end, other=0.0).to(tl.float32)
    if NORM:
        squares += row * row
        row *= tl.load(norm + k, mask=k < end, other=0.0).to(tl.float32)
    total += block.to(tl.float32) * row[None, :]
    return total, squares


@triton.jit
def _block(
    weight, begin, at, IN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # (TILE, BLOCK)
    """Read a block of the matrix."""
    m = begin + tl.arange(0, TILE)[:, None]
    k = at + tl.arange(0, BLOCK)[None, :]
    return tl.load(weight + m * IN + k, mask=(m < OUT) & (k < IN), other=0.0)


@triton.jit
def fetch(
    weight, IN: tl.constexpr, OUT: tl.constexpr,
    END: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ask the L2 cache for the tiles of this program, up to the row ``END`` of the matrix and its input ``LAST``."""
    m = tl.arange(0, TILE)[:, None]
    k = tl.arange(0, max(BLOCK // LINE, 1))[None, :] * LINE
    for tile in range(tl.program_id(0), tl.cdiv(END, TILE), tl.num_programs(0)):
        for start in range(0, LAST, BLOCK):
            at = tl.minimum(tile * TILE + m, OUT - 1) * IN + tl.minimum(start + k, LAST - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [weight + at], tl.int32, is_pure=False, pack=1
            )
