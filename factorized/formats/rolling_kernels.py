"""GPU kernels of thin convolutions that go over the rows of images from top to bottom and read each of them once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "height", "width"])
def rolling_kernel(
    x,  # (batch, height, width, inputs)
    packed,  # (3·outputs + 3·inputs, R)
    thin,  # (batch, height, width, R), written
    y,  # (batch, height, width, outputs), written
    columns,  # batch·width
    height,
    width,  # divides BM
    inputs,
    outputs,
    R: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,  # at least the inputs
    BN: tl.constexpr,  # at least the outputs
    ROWS: tl.constexpr,
):
    """Convolve rows of images from top to bottom; the thin results of three rows are on chip."""
    bands = tl.cdiv(height, ROWS)
    top = (tl.program_id(0) % bands) * ROWS
    a = tl.arange(0, BM)
    j = (tl.program_id(0) // bands) * BM + a
    n, w = j // width, j % width
    c, o, r = tl.arange(0, BC), tl.arange(0, BN), tl.arange(0, R)
    dtype = x.dtype.element_ty
    # Products with these matrices move rows of a tile to their neighbours in the image.
    left = ((a[None, :] + 1 == a[:, None]) & (w[:, None] > 0)).to(dtype)
    right = ((a[None, :] == a[:, None] + 1) & (w[:, None] + 1 < width)).to(dtype)
    V = packed + 3 * outputs * R + c[:, None] * 3 * R + r[None, :]
    U = packed + o[None, :] * 3 * R + r[:, None]
    known, wanted = (c[:, None] < inputs), (o[None, :] < outputs)
    above = tl.zeros((BM, R), dtype=dtype)
    own = tl.zeros((BM, R), dtype=dtype)
    there = (j < columns) & (top > 0)
    place = (n * height + top - 1) * width + w
    later = tl.load(x + place[:, None] * inputs + c[None, :], mask=there[:, None] & (c[None, :] < inputs), other=0.0)
    for step in range(ROWS + 2):
        h = top - 1 + step
        part = later
        there = (j < columns) & (h + 1 < height) & (step <= ROWS)  # the next row is read while this one is used
        place = (n * height + h + 1) * width + w
        known_later = there[:, None] & (c[None, :] < inputs)
        later = tl.load(x + place[:, None] * inputs + c[None, :], mask=known_later, other=0.0)
        place -= width
        there = (j < columns) & (h >= 0) & (h < height)
        first = tl.dot(part, tl.load(V, mask=known, other=0.0))
        total = tl.dot(part, tl.load(V + R, mask=known, other=0.0))
        last = tl.dot(part, tl.load(V + 2 * R, mask=known, other=0.0))
        total = tl.dot(left, first.to(dtype), total)
        below = tl.dot(right, last.to(dtype), total).to(dtype)
        inside = there & (step >= 1) & (step <= ROWS)
        tl.store(thin + place[:, None] * R + r[None, :], below, mask=inside[:, None])
        result = tl.dot(above, tl.load(U, mask=wanted, other=0.0))
        result = tl.dot(own, tl.load(U + R, mask=wanted, other=0.0), result)
        result = tl.dot(below, tl.load(U + 2 * R, mask=wanted, other=0.0), result)
        done = (j < columns) & (step >= 2) & (h - 1 < height)
        place -= width
        tl.store(y + place[:, None] * outputs + o[None, :], result.to(dtype), mask=done[:, None] & wanted)
        above = own
        own = below


@triton.jit(do_not_specialize=["columns", "height", "width", "rank", "split_size"])
def rolling_gradients_kernel(
    gradient,  # (batch, height, width, outputs)
    packed,  # (3·outputs + 3·inputs, R)
    thin,  # (batch, height, width, R)
    thin_gradient,  # (batch, height, width, R), written
    sums,  # (programs, all weights), written
    columns,  # batch·width
    height,
    width,
    outputs,
    rank,
    split_size,
    R: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,  # at least the outputs
    ROWS: tl.constexpr,
):
    """Write the thin tensor's gradient and sums of U's, by rows of images from top to bottom."""
    bands = tl.cdiv(height, ROWS)
    top = (tl.program_id(0) % bands) * ROWS
    j = (tl.program_id(0) // bands) * BM + tl.arange(0, BM)
    n, w = j // width, j % width
    c, r = tl.arange(0, BC), tl.arange(0, R)
    U = packed + c[:, None] * 3 * R + r[None, :]
    known = c[:, None] < outputs
    total0 = tl.zeros((BC, R), dtype=tl.float32)
    total1 = tl.zeros((BC, R), dtype=tl.float32)
    total2 = tl.zeros((BC, R), dtype=tl.float32)
    own = tl.zeros((BM, R), dtype=tl.float32)
    ahead = tl.zeros((BM, R), dtype=tl.float32)
    for step in range(ROWS + 2):
        h = top - 1 + step
        place = (n * height + h) * width + w
        there = (j < columns) & (h >= 0) & (h < height)
        part = tl.load(
            gradient + place[:, None] * outputs + c[None, :],
            mask=there[:, None] & (c[None, :] < outputs),
            other=0.0,
        )
        above = tl.dot(part, tl.load(U, mask=known, other=0.0), own)
        own = tl.dot(part, tl.load(U + R, mask=known, other=0.0), ahead)
        ahead = tl.dot(part, tl.load(U + 2 * R, mask=known, other=0.0))
        done = (j < columns) & (step >= 2) & (h - 1 < height)
        over = thin_gradient + (place - width)[:, None] * R + r[None, :]
        tl.store(over, above.to(part.dtype), mask=done[:, None])
        inside = there & (step >= 1) & (step <= ROWS)
        seen = thin + place[:, None] * R + r[None, :]
        a = tl.trans(part)
        total0 = tl.dot(a, tl.load(seen - width * R, mask=(inside & (h > 0))[:, None], other=0.0), total0)
        total1 = tl.dot(a, tl.load(seen, mask=inside[:, None], other=0.0), total1)
        total2 = tl.dot(a, tl.load(seen + width * R, mask=(inside & (h + 1 < height))[:, None], other=0.0), total2)
    target = sums + tl.program_id(0) * split_size + c[:, None] * 3 * rank + r[None, :]
    mask = known & (r[None, :] < rank)
    tl.store(target, total0, mask=mask)
    tl.store(target + rank, total1, mask=mask)
    tl.store(target + 2 * rank, total2, mask=mask)
