"""GPU kernels of a low-rank convolution after batch normalization and ReLU, which are applied while its input is read.

All tensors of activations are channels-last, seen as (positions, channels), where a position is a pixel. The
convolution is 3×3 with stride 1 and zeros around the image. *Thin* tensors have R channels: the rank, rounded up to a
power of two. ``spread`` has three thin tensors side by side, one for each tap along the width.

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
    spread,  # (positions, 3·R), written
    positions,
    C: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Multiply relu(scale x + shift) by the three taps of V; inputs are read once, and shifted where they are used."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    r = tl.arange(0, R)
    total0 = tl.zeros((BM, R), dtype=tl.float32)
    total1 = tl.zeros((BM, R), dtype=tl.float32)
    total2 = tl.zeros((BM, R), dtype=tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        known = (m[:, None] < positions) & (c[None, :] < C)
        values = tl.load(x + m[:, None] * C + c[None, :], mask=known, other=0.0)
        active = activated(values, coefficients, c, C, known)
        taps = V + c[:, None] * (3 * R) + r[None, :]
        inside = c[:, None] < C
        total0 = tl.dot(active, tl.load(taps, mask=inside, other=0.0), total0)
        total1 = tl.dot(active, tl.load(taps + R, mask=inside, other=0.0), total1)
        total2 = tl.dot(active, tl.load(taps + 2 * R, mask=inside, other=0.0), total2)
    place = spread + m[:, None] * (3 * R) + r[None, :]
    inside = m[:, None] < positions
    kind = spread.dtype.element_ty
    tl.store(place, total0.to(kind), mask=inside)
    tl.store(place + R, total1.to(kind), mask=inside)
    tl.store(place + 2 * R, total2.to(kind), mask=inside)


@triton.jit
def expand_kernel(
    spread,  # (positions, 3·R)
    U,  # (O·3, R)
    residual,  # (positions, O), added to the result
    thin,  # (positions, R), written: the convolution along the width
    y,  # (positions, O), written
    parts,  # (programs, 2, O), written: means and sums of squared distances from them
    positions,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add up the taps along the width, convolve along the height, and describe what is written for the next norm."""
    program = tl.program_id(0)
    m = program * BM + tl.arange(0, BM)
    r = tl.arange(0, R)
    inside = m < positions
    w, h = m % W, m // W % H
    kind = y.dtype.element_ty
    above = _along_width(spread, m - W, w, r, inside & (h > 0), W, R)
    own = _along_width(spread, m, w, r, inside, W, R)
    below = _along_width(spread, m + W, w, r, inside & (h < H - 1), W, R)
    tl.store(thin + m[:, None] * R + r[None, :], own, mask=inside[:, None])
    count = tl.minimum(positions - program * BM, BM).to(tl.float32)
    for start in range(0, O, BN):
        o = start + tl.arange(0, BN)
        taps = U + o[:, None] * (3 * R) + r[None, :]
        known = o[:, None] < O
        total = tl.dot(above, tl.trans(tl.load(taps, mask=known, other=0.0)))
        total = tl.dot(own, tl.trans(tl.load(taps + R, mask=known, other=0.0)), total)
        total = tl.dot(below, tl.trans(tl.load(taps + 2 * R, mask=known, other=0.0)), total)
        place = m[:, None] * O + o[None, :]
        both = inside[:, None] & (o[None, :] < O)
        if RESIDUAL:
            total += tl.load(residual + place, mask=both, other=0.0)
        rounded = total.to(kind)
        tl.store(y + place, rounded, mask=both)
        values = rounded.to(tl.float32)
        mean = tl.sum(tl.where(both, values, 0.0), 0) / count
        away = tl.where(both, values - mean[None, :], 0.0)
        tl.store(parts + program * 2 * O + o, mean, mask=o < O)
        tl.store(parts + program * 2 * O + O + o, tl.sum(away * away, 0), mask=o < O)


@triton.jit(do_not_specialize=["programs", "positions", "each"])
def statistics_kernel(
    parts,  # (programs, 2, C): means and sums of squared distances from them
    gamma,  # (C,)
    beta,  # (C,)
    statistics,  # (2, C), written: mean and variance
    coefficients,  # (2, C), written: scale and shift
    programs,
    positions,
    each,  # positions of a program
    epsilon,
    C: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Join the parts of mean and variance, and write what normalizes by them."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    total = tl.zeros((BC,), dtype=tl.float32)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        both = (p[:, None] < programs) & known[None, :]
        count = tl.minimum(positions - p * each, each).to(tl.float32)
        means = tl.load(parts + p[:, None] * 2 * C + c[None, :], mask=both, other=0.0)
        total += tl.sum(means * count[:, None], 0)
    mean = total / positions
    total = tl.zeros((BC,), dtype=tl.float32)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        both = (p[:, None] < programs) & known[None, :]
        count = tl.minimum(positions - p * each, each).to(tl.float32)
        place = parts + p[:, None] * 2 * C + c[None, :]
        away = tl.where(both, tl.load(place, mask=both, other=0.0) - mean[None, :], 0.0)
        total += tl.sum(tl.load(place + C, mask=both, other=0.0) + away * away * count[:, None], 0)
    variance = total / positions
    scale = tl.load(gamma + c, mask=known, other=0.0) / tl.sqrt(variance + epsilon)
    tl.store(statistics + c, mean, mask=known)
    tl.store(statistics + C + c, variance, mask=known)
    tl.store(coefficients + c, scale, mask=known)
    tl.store(coefficients + C + c, tl.load(beta + c, mask=known, other=0.0) - mean * scale, mask=known)


@triton.jit
def activated(values, coefficients, c, C: tl.constexpr, known):
    """Return relu(scale x + shift) in the type of x, and zero where x is not known."""
    scale = tl.load(coefficients + c, mask=c < C, other=0.0)
    shift = tl.load(coefficients + C + c, mask=c < C, other=0.0)
    active = tl.maximum(values.to(tl.float32) * scale[None, :] + shift[None, :], 0.0)
    return tl.where(known, active, 0.0).to(values.dtype)


@triton.jit
def _along_width(spread, m, w, r, inside, W: tl.constexpr, R: tl.constexpr):
    """Return the sum of the three taps at the positions m, in the type of what is added."""
    place = spread + m[:, None] * (3 * R) + r[None, :]
    left = tl.load(place - 3 * R, mask=(inside & (w > 0))[:, None], other=0.0)
    own = tl.load(place + R, mask=inside[:, None], other=0.0)
    right = tl.load(place + 5 * R, mask=(inside & (w < W - 1))[:, None], other=0.0)
    return (left.to(tl.float32) + own.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
