"""GPU kernels of a low-rank convolution after batch normalization and ReLU, which are applied while its input is read.

All tensors of activations are channels-last, seen as (positions, channels), where a position is a pixel. The
convolution is 3×3 with stride 1 and zeros around the image. *Thin* tensors have R channels: the rank, rounded up to a
power of two. A split is a span of positions that one program walks through, for some of the channels.

Sums over positions are stored per program and added up afterwards in a fixed order, so that results do not vary.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def project_kernel(
    x,  # (positions, C)
    coefficients,  # (2, C): scale and shift
    V,  # (C·3, R)
    thin,  # (positions, R), written
    positions,
    W: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,  # of images, as many as BM positions hold
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Convolve relu(scale x + shift) along the width. Inputs are read once: their products with the taps are moved."""
    i = tl.arange(0, BM)
    m = tl.program_id(0) * (ROWS * W) + i
    inside = (i < ROWS * W) & (m < positions)
    r = tl.arange(0, R)
    total0 = tl.zeros((BM, R), dtype=tl.float32)
    total1 = tl.zeros((BM, R), dtype=tl.float32)
    total2 = tl.zeros((BM, R), dtype=tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        known = inside[:, None] & (c[None, :] < C)
        scale, shift = read(coefficients + c, c < C, EVEN), read(coefficients + C + c, c < C, EVEN)
        active = activated(read(x + m[:, None] * C + c[None, :], known, EVEN), scale, shift, known, EVEN)
        taps = V + c[:, None] * (3 * R) + r[None, :]
        rows = c[:, None] < C
        total0 = tl.dot(active, read(taps, rows, EVEN), total0)
        total1 = tl.dot(active, read(taps + R, rows, EVEN), total1)
        total2 = tl.dot(active, read(taps + 2 * R, rows, EVEN), total2)
    w = (i % W)[:, None]
    before, after = tl.maximum(i - 1, 0), tl.minimum(i + 1, BM - 1)
    total1 += tl.where(w > 0, tl.gather(total0, tl.broadcast_to(before[:, None], (BM, R)), 0), 0.0)
    total1 += tl.where(w < W - 1, tl.gather(total2, tl.broadcast_to(after[:, None], (BM, R)), 0), 0.0)
    tl.store(thin + m[:, None] * R + r[None, :], total1.to(thin.dtype.element_ty), mask=inside[:, None])


@triton.jit
def expand_kernel(
    thin,  # (positions, R): the convolution along the width
    U,  # (C·3, R)
    residual,  # (positions, C), added to the result
    y,  # (positions, C), written
    parts,  # (splits, 2, C), written: means and sums of squared distances from them
    positions,
    span,  # positions of a split, a multiple of GM
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,  # of y
    R: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,  # tiles that are read ahead
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    """Convolve along the height, and describe what is written for the next norm."""
    split, c = walk(tl.program_id(0), C, GC)
    r = tl.arange(0, R)
    U0, U1, U2 = taps_of(U, c, r, C, R, EVEN)
    sums = tl.zeros((GM, GC), dtype=tl.float32)  # added up at the end: sums across threads take long
    squares = tl.zeros((GM, GC), dtype=tl.float32)
    end = tl.minimum((split + 1) * span, positions)
    for start in tl.range(split * span, end, GM, num_stages=AHEAD):
        m = start + tl.arange(0, GM)
        h = m // W % H
        inside = m < end
        place = m[:, None] * C + c[None, :]
        known = inside[:, None] & (c[None, :] < C)
        thins = thin + m[:, None] * R + r[None, :]
        above = tl.load(thins - W * R, mask=(inside & (h > 0))[:, None], other=0.0)
        own = read(thins, inside[:, None], EVEN)
        below = tl.load(thins + W * R, mask=(inside & (h < H - 1))[:, None], other=0.0)
        total = tl.dot(above, U0)
        total = tl.dot(own, U1, total)
        total = tl.dot(below, U2, total)
        if RESIDUAL:
            total += read(residual + place, known, EVEN)
        rounded = total.to(y.dtype.element_ty)
        if EVEN:
            tl.store(y + place, rounded)
        else:
            tl.store(y + place, rounded, mask=known)
        values = rounded.to(tl.float32)  # zero where it is not known
        sums += values
        squares += values * values
    total_sums = tl.sum(sums, 0)
    mean = total_sums / tl.maximum(end - split * span, 1).to(tl.float32)
    tl.store(parts + split * 2 * C + c, mean, mask=c < C)
    tl.store(parts + split * 2 * C + C + c, tl.sum(squares, 0) - total_sums * mean, mask=c < C)


@triton.jit(do_not_specialize=["programs", "positions", "each"])
def statistics_kernel(
    parts,  # (programs, 2, C): means and sums of squared distances from them
    gamma,  # (C,)
    beta,  # (C,)
    statistics,  # (2, C), written: mean and variance
    coefficients,  # (2, C), written: scale and shift
    running_mean,  # (C,), followed
    running_var,  # (C,), followed
    programs,
    positions,
    each,  # positions of a program
    momentum,
    epsilon,
    C: tl.constexpr,
    RUNNING: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Join the parts of mean and variance, write what normalizes by them, and let the running ones follow."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    about = tl.load(parts + c, mask=known, other=0.0)  # close to the mean, so that squares of distances are small
    first = tl.zeros((BP, BC), dtype=tl.float32)
    second = tl.zeros((BP, BC), dtype=tl.float32)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        both = (p[:, None] < programs) & known[None, :]
        count = tl.minimum(positions - p * each, each).to(tl.float32)
        place = parts + p[:, None] * 2 * C + c[None, :]
        away = tl.where(both, tl.load(place, mask=both, other=0.0) - about[None, :], 0.0)
        first += away * count[:, None]
        second += tl.load(place + C, mask=both, other=0.0) + away * away * count[:, None]
    shift = tl.sum(first, 0) / positions
    mean = about + shift
    variance = positive(tl.sum(second, 0) / positions - shift * shift)
    scale = tl.load(gamma + c, mask=known, other=0.0) / tl.sqrt(variance + epsilon)
    tl.store(statistics + c, mean, mask=known)
    tl.store(statistics + C + c, variance, mask=known)
    tl.store(coefficients + c, scale, mask=known)
    tl.store(coefficients + C + c, tl.load(beta + c, mask=known, other=0.0) - mean * scale, mask=known)
    if RUNNING:
        follow(running_mean + c, mean, momentum, known)
        follow(running_var + c, variance * (positions / tl.maximum(positions - 1, 1)), momentum, known)


@triton.jit
def follow(pointers, values, momentum, known):
    """Move numbers towards values."""
    old = tl.load(pointers, mask=known, other=0.0)
    tl.store(pointers, old + momentum * (values - old), mask=known)


@triton.jit
def walk(program, C: tl.constexpr, GC: tl.constexpr):
    """Return the split that a program walks through, and its channels."""
    tiles: tl.constexpr = (C + GC - 1) // GC
    return program // tiles, (program % tiles) * GC + tl.arange(0, GC)


@triton.jit
def taps_of(factor, c, r, C: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr):
    """Return the three taps of a factor (C·3, R) for the channels c, each (R, channels)."""
    place, known = factor + c[:, None] * (3 * R) + r[None, :], c[:, None] < C
    first, second = tl.trans(read(place, known, EVEN)), tl.trans(read(place + R, known, EVEN))
    return first, second, tl.trans(read(place + 2 * R, known, EVEN))


@triton.jit
def read(pointers, known, EVEN: tl.constexpr):
    """Load from pointers, and return zero where ``known`` is false; ``EVEN`` says that all are known."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=known, other=0.0)


@triton.jit
def positive(values):
    """Return relu(values); NaN stays NaN, because a network that diverged must not look healthy."""
    return tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activated(values, scale, shift, known, EVEN: tl.constexpr):
    """Return relu(scale x + shift) in the type of x, and zero where x is not known."""
    active = positive(values.to(tl.float32) * scale[None, :] + shift[None, :])
    if not EVEN:
        active = tl.where(known, active, 0.0)
    return active.to(values.dtype)
