"""A GPU kernel that multiplies one row by a matrix, and reads the matrix ahead into a ring of buffers in shared memory.

All buffers are on their way before it waits for the kernel that writes the row. It leaves room on a processor for the
programs of the next kernel, which fill theirs meanwhile. The library's kernel (``factorized/nn/one_row_kernel.py``)
reads into registers, of which it takes all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from factorized.nn.one_row_kernel import LINE, _block

VECTOR = tl.constexpr(8)  # elements that a thread reads at once, and sums by itself


@triton.jit
def ring_kernel(
    x,  # (WIDTH,)
    weight,  # (OUT, IN); gated: (2 * OUT, IN)
    norm,  # (WIDTH,)
    residual,  # (OUT,)
    y,  # (OUT,), written
    eps,  # not negative
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
    TILES: tl.constexpr,  # of each program
    LINES: tl.constexpr,  # of the cache that x has, at least; a power of two
    BUFFERS: tl.constexpr,  # of the ring
):
    """Write the row times a matrix, or the gated product of the row and two."""
    first = tl.program_id(0) * TILES
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (IN + BLOCK - 1) // BLOCK
    total = tl.zeros((TILE, BLOCK // VECTOR), tl.float32)
    other = tl.zeros((TILE, BLOCK // VECTOR), tl.float32)
    squares = tl.zeros((1, BLOCK // VECTOR), tl.float32)
    m = tl.arange(0, TILE)
    # One loop over all blocks of all tiles, so that the ring is also full where one tile ends and the next begins.
    for i in tl.range(0, tl.minimum(TILES, tl.cdiv(OUT, TILE) - first) * BLOCKS, num_stages=BUFFERS + 1):
        begin, at = (first + i // BLOCKS) * TILE, i % BLOCKS * BLOCK
        block = _block(weight, begin, at, IN, OUT, TILE, BLOCK)
        values = block
        if GATED:
            values = _block(weight + OUT * IN, begin, at, IN, OUT, TILE, BLOCK)
        part, end = x, IN
        if OUT_1 < OUT and not GATED:
            offset = tl.where(begin >= OUT_2, IN_2, tl.where(begin >= OUT_1, IN_1, 0))
            part, end = x + offset, tl.minimum(IN, WIDTH - offset)
        row = _row(part, end, at, eps, EARLY and i == 0, x, norm, WIDTH, NORM, BLOCK, LINES)
        if NORM:
            squares += _partial_sums((row * row)[None, :])
            row *= _row(norm, IN, at, eps, False, x, norm, WIDTH, NORM, BLOCK, 0)
        total += _partial_sums(block.to(tl.float32) * row[None, :])
        if GATED:
            if IN_1 > 0:
                part, end = x + IN_1, min(IN, WIDTH - IN_1)
                row = _row(part, end, at, eps, EARLY and i == 0, x, norm, WIDTH, NORM, BLOCK, 0)
            other += _partial_sums(values.to(tl.float32) * row[None, :])
        if i % BLOCKS == BLOCKS - 1:
            value = tl.sum(total, 1)
            total = tl.zeros((TILE, BLOCK // VECTOR), tl.float32)
            if NORM:
                value *= tl.rsqrt(tl.sum(squares, 1) / IN + eps)
                squares = tl.zeros((1, BLOCK // VECTOR), tl.float32)
            if GATED:
                value = value * tl.sigmoid(value) * tl.sum(other, 1)
                other = tl.zeros((TILE, BLOCK // VECTOR), tl.float32)
            if RESIDUAL:
                value += tl.load(residual + begin + m, mask=begin + m < OUT, other=0.0).to(tl.float32)
            tl.store(y + begin + m, value.to(y.dtype.element_ty), mask=begin + m < OUT)


@triton.jit
def _row(
    part, end, at, eps, wait, x, norm,
    WIDTH: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Read a block of a part of the row, or of the norm's weight, (BLOCK,); before, ``wait`` for the kernel before."""
    k = at + tl.arange(0, BLOCK)
    row = tl.zeros((BLOCK,), part.dtype.element_ty)
    # Always true. The compiler moves loads to earlier turns of the loop, and a wait that nothing depends on to the end,
    # but keeps the order of what is done under one condition.
    if eps >= 0:
        if wait:
            if NORM and LINES > 0:
                _touch(norm, WIDTH, LINES)
            tl.extra.cuda.gdc_wait()
            if LINES > 0:
                _touch(x, WIDTH, LINES)
        row = tl.load(part + k, mask=k < end, other=0.0)
    return row.to(tl.float32)


@triton.jit
def _partial_sums(products):  # (TILE, BLOCK) to (TILE, BLOCK // VECTOR)
    """Sum neighbours, which one thread holds."""
    return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // VECTOR, VECTOR)), 2)


@triton.jit
def _touch(x, WIDTH: tl.constexpr, LINES: tl.constexpr):
    """Read all of a row into the L1 cache at once: otherwise every block would wait for the L2 cache by itself."""
    at = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
    loaded = tl.inline_asm_elementwise("ld.global.u16 $0, [$1];", "=h,l", [x + at], tl.int16, is_pure=False, pack=1)
    # Loads without any use would be removed. This use does nothing, and comes after all of them.
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.u16 p, $1, 0x7fff; @p prefetch.global.L2 [$2]; mov.b32 $0, 0; }",
        "=r,h,l", [loaded, x + at], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
