"""The GPU kernel of chains of matrices for few rows: all of them, one after the other, in one launch.

A stage multiplies the rows by one matrix: its programs take tiles of the outputs in turn. Before each stage all
programs wait for each other. Meanwhile they already read the next matrix, which depends on nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_PREFETCHED = tl.constexpr(2**23)  # elements, a fraction of the L2 cache


@triton.jit
def chain_kernel(
    tensors,  # all of them: inputs, matrices, and the results of stages, which are written
    flag,  # uint32, zero: where programs wait
    eps,  # of all norms
    STAGES: tl.constexpr,  # for each the numbers that ``_write`` reads
    BEGIN: tl.constexpr,
    END: tl.constexpr,  # stages of this launch
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,  # warps of a program
    PREFETCH: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,  # the kernels before and after may run at the same time
):
    """Run the stages one after the other."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    for stage in tl.static_range(BEGIN, END):
        before = 0
        if stage > BEGIN:
            before = _arrive(flag)
        if AHEAD:
            gate = _first_block(tensors, STAGES, stage, 0, ROWS, CHUNKS)
            up = _first_block(tensors, STAGES, stage, STAGES[stage][5], ROWS, CHUNKS)
        else:
            gate = 0
            up = 0
        if PREFETCH and (stage > BEGIN or OVERLAP):
            _prefetch(tensors, STAGES, stage)
        if stage > BEGIN:
            _wait(flag, before)
        elif OVERLAP:
            tl.extra.cuda.gdc_wait()
        begin = tl.program_id(0)
        if AHEAD:
            _write(tensors, eps, STAGES, stage, begin, gate, up, ROWS, CHUNKS, True)
            begin += tl.num_programs(0)
        for tile in range(begin, tl.cdiv(STAGES[stage][8], STAGES[stage][9]), tl.num_programs(0)):
            _write(tensors, eps, STAGES, stage, tile, 0, 0, ROWS, CHUNKS, False)


@triton.jit
def _write(
    tensors,
    eps,
    STAGES: tl.constexpr,
    AT: tl.constexpr,
    tile,
    gate,
    up,  # blocks of the matrix that are read already
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Write a tile of the rows times one matrix, or of the gated product of two."""
    x, weight, y = tensors[STAGES[AT][0]], tensors[STAGES[AT][1]], tensors[STAGES[AT][2]]
    RESIDUAL: tl.constexpr = STAGES[AT][3]  # which tensor is added; -1: none
    NORM: tl.constexpr = STAGES[AT][4]  # which tensor is the weight of an RMS norm of the rows; -1: none
    GATED: tl.constexpr = STAGES[AT][5]  # the matrix has the rows of the gate, then as many of the values
    WIDTH: tl.constexpr = STAGES[AT][6]  # of x
    IN: tl.constexpr = STAGES[AT][7]
    OUT: tl.constexpr = STAGES[AT][8]
    TILE: tl.constexpr = STAGES[AT][9]
    BLOCK: tl.constexpr = STAGES[AT][10]
    END_0: tl.constexpr = STAGES[AT][11]  # outputs where the first part of x ends
    END_1: tl.constexpr = STAGES[AT][12]  # and the second
    begin = tile * TILE
    part = x
    if END_0 < OUT:
        part += tl.where(begin >= END_0, IN, 0) + tl.where(begin >= END_1, IN, 0)
    norm = tensors[NORM if NORM >= 0 else 0]
    value = _tile(part, norm, eps, weight, begin, gate, WIDTH, IN, OUT, ROWS, NORM >= 0, TILE, BLOCK, CHUNKS, AHEAD)
    if GATED:
        part, weight = x + (WIDTH - IN), weight + OUT * IN
        other = _tile(part, norm, eps, weight, begin, up, WIDTH, IN, OUT, ROWS, NORM >= 0, TILE, BLOCK, CHUNKS, AHEAD)
        value = value * tl.sigmoid(value) * other
    m = begin + tl.arange(0, TILE)
    if ROWS == 1:
        place, inside = m, m < OUT
    else:
        n = tl.arange(0, 8)
        place = n[None, :] * OUT + m[:, None]
        inside = (m[:, None] < OUT) & (n[None, :] < ROWS)
    if RESIDUAL >= 0:
        value += tl.load(tensors[RESIDUAL] + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _tile(
    x,
    norm,
    eps,
    weight,
    begin,
    ahead,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Return a tile of the outputs: (TILE,) for one row, else (TILE, 8)."""
    if ROWS == 1:
        total = tl.zeros((TILE, BLOCK), tl.float32)
        squares = tl.zeros((BLOCK,), tl.float32)
    else:
        total = tl.zeros((CHUNKS, TILE, 8), tl.float32)
        squares = tl.zeros((CHUNKS, BLOCK // CHUNKS, 8), tl.float32)
    start = 0
    if AHEAD:
        total, squares = _add(total, squares, ahead, x, norm, 0, WIDTH, IN, ROWS, NORM, BLOCK, CHUNKS)
        start = BLOCK
    for at in tl.range(start, IN, BLOCK):
        matrix = _block(weight, begin, at, IN, OUT, ROWS, TILE, BLOCK, CHUNKS)
        total, squares = _add(total, squares, matrix, x, norm, at, WIDTH, IN, ROWS, NORM, BLOCK, CHUNKS)
    if ROWS == 1:
        value = tl.sum(total, 1)
        if NORM:
            value *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    else:
        value = tl.sum(total, 0)
        if NORM:
            value *= tl.rsqrt(tl.sum(tl.sum(squares, 0), 0) / IN + eps)[None, :]
    return value


@triton.jit
def _add(
    total,
    squares,
    matrix,
    x,
    norm,
    at,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Add the rows times a block of the matrix, and their squares."""
    if ROWS == 1:
        k = at + tl.arange(0, BLOCK)
        row = tl.load(x + k, mask=k < IN, other=0.0).to(tl.float32)
        if NORM:
            squares += row * row
            row *= tl.load(norm + k, mask=k < IN, other=0.0).to(tl.float32)
        total += matrix.to(tl.float32) * row[None, :]
    else:
        # Every warp multiplies its own part of the inputs: with few rows there is nothing else to share among them.
        n = tl.arange(0, 8)[None, None, :]
        c = tl.arange(0, CHUNKS)[:, None, None] * (BLOCK // CHUNKS)
        k = at + c + tl.arange(0, BLOCK // CHUNKS)[None, :, None]
        rows = tl.load(x + n * WIDTH + k, mask=(n < ROWS) & (k < IN), other=0.0)
        if NORM:
            squares += rows.to(tl.float32) * rows.to(tl.float32)
            rows = (rows * tl.load(norm + k, mask=k < IN, other=0.0)).to(rows.dtype)
        total = tl.dot(matrix, rows, total)
    return total, squares


@triton.jit
def _block(
    weight,
    begin,
    at,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Read a block of the matrix: (TILE, BLOCK) for one row, else (CHUNKS, TILE, BLOCK // CHUNKS)."""
    if ROWS == 1:
        m = begin + tl.arange(0, TILE)[:, None]
        k = at + tl.arange(0, BLOCK)[None, :]
    else:
        m = begin + tl.arange(0, TILE)[None, :, None]
        c = tl.arange(0, CHUNKS)[:, None, None] * (BLOCK // CHUNKS)
        k = at + c + tl.arange(0, BLOCK // CHUNKS)[None, None, :]
    return tl.load(weight + m * IN + k, mask=(m < OUT) & (k < IN), other=0.0)


@triton.jit
def _first_block(
    tensors, STAGES: tl.constexpr, AT: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr
):
    """Read the first block of this program's first tile; ``HALF`` 1: of the second half of the matrix."""
    IN: tl.constexpr = STAGES[AT][7]
    OUT: tl.constexpr = STAGES[AT][8]
    TILE: tl.constexpr = STAGES[AT][9]
    weight = tensors[STAGES[AT][1]] + HALF * OUT * IN
    return _block(weight, tl.program_id(0) * TILE, 0, IN, OUT, ROWS, TILE, STAGES[AT][10], CHUNKS)


@triton.jit
def _prefetch(tensors, STAGES: tl.constexpr, AT: tl.constexpr):
    """Ask the L2 cache for the tiles of this program, as far as they fit."""
    IN: tl.constexpr = STAGES[AT][7]
    OUT: tl.constexpr = STAGES[AT][8]
    TILE: tl.constexpr = STAGES[AT][9]
    BLOCK: tl.constexpr = STAGES[AT][10]
    LINE: tl.constexpr = 64  # elements of two bytes in a line of the cache
    END: tl.constexpr = min(OUT, MOST_PREFETCHED // (1 + STAGES[AT][5]) // IN)
    m = tl.arange(0, TILE)[:, None]
    k = tl.arange(0, BLOCK // LINE)[None, :] * LINE
    for half in tl.static_range(1 + STAGES[AT][5]):
        weight = tensors[STAGES[AT][1]] + half * OUT * IN
        for tile in range(tl.program_id(0), tl.cdiv(END, TILE), tl.num_programs(0)):
            for start in range(0, IN, BLOCK):
                at = tl.minimum(tile * TILE + m, OUT - 1) * IN + tl.minimum(start + k, IN - 1)
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [weight + at], tl.int32, is_pure=False, pack=1
                )


@triton.jit
def _arrive(flag):
    """Say that this program has written its results. The sign of ``flag`` changes when the last program does."""
    tl.debug_barrier()
    arrivals = tl.where(tl.program_id(0) == 0, 0x80000000 - (tl.num_programs(0).to(tl.int64) - 1), 1).to(tl.uint32)
    return tl.atomic_add(flag, arrivals, sem="release")


@triton.jit
def _wait(flag, before):
    """Wait for the sign of ``flag`` to change."""
    waiting = True
    while waiting:
        now = tl.atomic_add(flag, tl.full([], 0, tl.uint32), sem="acquire")
        waiting = ((before ^ now) & 0x80000000) == 0
    tl.debug_barrier()
