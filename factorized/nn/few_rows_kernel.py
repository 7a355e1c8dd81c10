"""The GPU kernel that multiplies up to eight rows by a matrix on tensor cores, and starts while the one before runs.

As in ``row_kernel``, the first block of the matrix is read, and the rest asked for, before a program waits. The warps
of a program share the inputs, and each thread reads 16 bytes of a row. Tensor cores expect other inputs in each thread;
but sums do not depend on the order of the inputs. So they get the inputs in the order in which the threads hold them,
those of x as those of the matrix, and threads exchange nothing until the sums of the warps are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from factorized.nn.one_row_kernel import MOST_FETCHED, fetch

ROWS = tl.constexpr(8)  # of x or the matrix in a piece, as tensor cores want
DEPTH = tl.constexpr(32)  # inputs of a piece for each warp: four threads read a row, 16 bytes each


@triton.jit
def few_rows_kernel(
    x,  # (rows, WIDTH)
    weight,  # (OUT, IN); gated: (2 * OUT, IN)
    norm,  # (WIDTH,)
    residual,  # (rows, OUT); there is no norm and no gate then
    y,  # (rows, OUT), written
    eps,
    rows,
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
    TALL: tl.constexpr,  # pieces of a tile of outputs, one below the other: one or two
    WIDE: tl.constexpr,  # pieces that are read at a time, side by side
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,  # the kernels before and after may run at the same time
):
    """Write the rows times a matrix, or the gated product of the rows and two."""
    TILE: tl.constexpr = TALL * ROWS
    first = tl.program_id(0) * TILE
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    block = _block(weight, first, 0, (1 + GATED) * OUT, IN, TALL, WIDE, WARPS)
    if EARLY:
        LAST: tl.constexpr = min(IN, MOST_FETCHED // ((1 + GATED) * OUT))
        for half in tl.static_range(1 + GATED):
            fetch(weight + half * OUT * IN, IN, OUT, OUT, LAST, TILE, min(triton.next_power_of_2(LAST), 4096))
        tl.extra.cuda.gdc_wait()
    # fmt: off
    _write(x, weight, norm, residual, y, eps, rows, first, block, WIDTH, IN, OUT, OUT_1, OUT_2, IN_1, IN_2,
           NORM, RESIDUAL, GATED, TALL, WIDE, WARPS)
    # one stage: the compiler would copy blocks of later tiles to shared memory
    for begin in tl.range(first + tl.num_programs(0) * TILE, OUT, tl.num_programs(0) * TILE, num_stages=1):
        block = _block(weight, begin, 0, (1 + GATED) * OUT, IN, TALL, WIDE, WARPS)
        _write(x, weight, norm, residual, y, eps, rows, begin, block, WIDTH, IN, OUT, OUT_1, OUT_2, IN_1, IN_2,
               NORM, RESIDUAL, GATED, TALL, WIDE, WARPS)
    # fmt: on


@triton.jit
def _write(
    x, weight, norm, residual, y, eps, rows, begin, block,
    WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    OUT_1: tl.constexpr, OUT_2: tl.constexpr, IN_1: tl.constexpr, IN_2: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write the tile of outputs from ``begin``; ``block`` is its first of the matrix."""
    zeros: tl.tuple = ()
    for _ in tl.static_range(TALL):
        zeros += (tl.zeros((WARPS, ROWS, ROWS), tl.float32),)
    # fmt: off
    if GATED:
        gate, squares, block = _sums(zeros, x, min(IN, WIDTH), weight, norm, block, begin, OUT + begin, rows,
                                     WIDTH, IN, 2 * OUT, NORM, TALL, WIDE, WARPS)
        total, squares, block = _sums(zeros, x + IN_1, min(IN, WIDTH - IN_1), weight, norm, block, OUT + begin, 2 * OUT,
                                      rows, WIDTH, IN, 2 * OUT, NORM, TALL, WIDE, WARPS)
        gate, value = tl.split(tl.sum(tl.join(gate, total), 0))
    else:
        part, end = x, min(IN, WIDTH)
        if OUT_1 < OUT:
            second, third = begin >= OUT_1, begin >= OUT_2
            part = x + tl.where(third, IN_2, tl.where(second, IN_1, 0))
            end = tl.where(third, min(IN, WIDTH - IN_2), tl.where(second, min(IN, WIDTH - IN_1), end))
        first = _residuals(residual, rows, begin, OUT, TALL, WARPS) if RESIDUAL else zeros
        total, squares, block = _sums(first, part, end, weight, norm, block, begin, OUT, rows,
                                      WIDTH, IN, OUT, NORM, TALL, WIDE, WARPS)
        value = tl.sum(total, 0)
    # fmt: on
    if NORM:
        inverse = tl.rsqrt(tl.sum(tl.sum(squares, 2), 1) / IN + eps)[:, None]
        value *= inverse
    if GATED:
        if NORM:
            gate *= inverse
        value *= gate * tl.sigmoid(gate)
    r, m = tl.arange(0, ROWS)[:, None], begin + tl.arange(0, TALL * ROWS)[None, :]
    tl.store(y + r * OUT + m, value.to(y.dtype.element_ty), mask=(r < rows) & (m < OUT))


@triton.jit
def _sums(
    totals, x, end, weight, norm, block, row, next_row, rows,
    WIDTH: tl.constexpr, IN: tl.constexpr, END: tl.constexpr, NORM: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return the sums of each warp, (WARPS, ROWS, TALL * ROWS), the squares of x, and the first block at ``next_row``.

    The next block is on its way while one is used.
    """
    squares = tl.zeros((ROWS, WARPS, DEPTH // 8), tl.float32)
    for at in tl.static_range(0, IN, WIDE * WARPS * DEPTH):
        parts: tl.tuple = ()
        scales: tl.tuple = ()
        for j in tl.static_range(WIDE):
            parts += (_piece(x, 0, at + j * WARPS * DEPTH, rows, end, WIDTH, WARPS),)
            if NORM:
                scales += (_piece(norm, 0, at + j * WARPS * DEPTH, ROWS, end, 0, WARPS),)
        if at + WIDE * WARPS * DEPTH < IN:
            following = _block(weight, row, at + WIDE * WARPS * DEPTH, END, IN, TALL, WIDE, WARPS)
        else:
            following = _block(weight, next_row, 0, END, IN, TALL, WIDE, WARPS)
        for j in tl.static_range(WIDE):
            part = parts[j]
            if NORM:
                exact = part.to(tl.float32)
                squares += tl.sum(tl.reshape(exact * exact, (ROWS, WARPS, DEPTH // 8, 8)), 3)
                part = (exact * scales[j].to(tl.float32)).to(part.dtype)
            totals = _add(totals, part, block, j, TALL, WIDE, WARPS)
        block = following
    return _beside(totals, TALL, WARPS), squares, block


@triton.jit
def _residuals(residual, rows, begin, OUT: tl.constexpr, TALL: tl.constexpr, WARPS: tl.constexpr):
    """Return the residual of a tile as what the sums of its first warp begin with."""
    residuals: tl.tuple = ()
    for i in tl.static_range(TALL):
        r, m = tl.arange(0, ROWS)[:, None], begin + i * ROWS + tl.arange(0, ROWS)[None, :]
        value = tl.load(residual + r * OUT + m, mask=(r < rows) & (m < OUT), other=0.0).to(tl.float32)
        residuals += (tl.where(tl.arange(0, WARPS)[:, None, None] == 0, value[None, :, :], 0.0),)
    return residuals


@triton.jit
def _add(totals, part, block, j: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr):
    """Add the products of a piece of x with those of the matrix below one another."""
    added: tl.tuple = ()
    for i in tl.static_range(TALL):
        matrix = tl.permute(_operand(block[i * WIDE + j], WARPS), (0, 2, 1))
        added += (tl.dot(_operand(part, WARPS), matrix, totals[i], input_precision="ieee"),)
    return added


@triton.jit
def _operand(piece, WARPS: tl.constexpr):  # (ROWS, WARPS, DEPTH) to (WARPS, ROWS, DEPTH)
    """Return a piece with its inputs in the order in which tensor cores find them in the threads that read them."""
    inputs = tl.reshape(piece, (ROWS, WARPS, DEPTH // 8, 2, 2, 2))
    return tl.reshape(tl.permute(inputs, (1, 0, 3, 4, 2, 5)), (WARPS, ROWS, DEPTH))


@triton.jit
def _beside(totals, TALL: tl.constexpr, WARPS: tl.constexpr):  # (WARPS, ROWS, TALL * ROWS)
    """Return the sums for a tile of outputs as one tensor."""
    if TALL == 1:
        beside = totals[0]
    else:
        both = tl.permute(tl.join(totals[0], totals[1]), (0, 1, 3, 2))
        beside = tl.reshape(both, (WARPS, ROWS, 2 * ROWS))
    return beside


@triton.jit
def _block(
    weight, row, at, END: tl.constexpr, IN: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr
):
    """Read pieces of the matrix, side by side and one below the other; zeros from the row ``END`` on."""
    block: tl.tuple = ()
    for i in tl.static_range(TALL):
        for j in tl.static_range(WIDE):
            block += (_piece(weight, row + i * ROWS, at + j * WARPS * DEPTH, END, IN, IN, WARPS),)
    return block


@triton.jit
def _piece(tensor, row, at, rows, end, STRIDE: tl.constexpr, WARPS: tl.constexpr):  # (ROWS, WARPS, DEPTH)
    """Read a piece of x or the matrix; zeros from the row ``rows`` and the input ``end`` on."""
    r = row + tl.arange(0, ROWS)[:, None, None]
    k = at + tl.arange(0, WARPS)[None, :, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    return tl.load(tensor + r * STRIDE + k, mask=(r < rows) & (k < end), other=0.0)
