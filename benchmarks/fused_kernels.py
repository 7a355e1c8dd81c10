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
    EVEN: tl.constexpr,
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
        active = activated(read(x + m[:, None] * C + c[None, :], known, EVEN), coefficients, c, known, C, EVEN)
        taps = V + c[:, None] * (3 * R) + r[None, :]
        inside = c[:, None] < C
        total0 = tl.dot(active, read(taps, inside, EVEN), total0)
        total1 = tl.dot(active, read(taps + R, inside, EVEN), total1)
        total2 = tl.dot(active, read(taps + 2 * R, inside, EVEN), total2)
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
    BY_PRODUCTS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TURNS: tl.constexpr,  # tiles of channels of a program
):
    """Add up the taps along the width, convolve along the height, and describe what is written for the next norm."""
    shares: tl.constexpr = (O + BN * TURNS - 1) // (BN * TURNS)
    program, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    m = program * BM + tl.arange(0, BM)
    r = tl.arange(0, R)
    inside = m < positions
    w, h = m % W, m // W % H
    kind = y.dtype.element_ty
    above = _along_width(spread, m - W, w, r, inside & (h > 0), W, R)
    own = _along_width(spread, m, w, r, inside, W, R)
    below = _along_width(spread, m + W, w, r, inside & (h < H - 1), W, R)
    tl.store(thin + m[:, None] * R + r[None, :], own, mask=inside[:, None] & (share == 0))
    count = tl.minimum(positions - program * BM, BM).to(tl.float32)
    for turn in range(TURNS):
        o = (share * TURNS + turn) * BN + tl.arange(0, BN)
        place = m[:, None] * O + o[None, :]
        both = inside[:, None] & (o[None, :] < O)
        if RESIDUAL:  # asked for before the products, which it arrives during
            added = read(residual + place, both, EVEN)
        taps = U + o[:, None] * (3 * R) + r[None, :]
        known = o[:, None] < O
        total = tl.dot(above, tl.trans(read(taps, known, EVEN)))
        total = tl.dot(own, tl.trans(read(taps + R, known, EVEN)), total)
        total = tl.dot(below, tl.trans(read(taps + 2 * R, known, EVEN)), total)
        if RESIDUAL:
            total += added
        rounded = total.to(kind)
        if EVEN:
            tl.store(y + place, rounded)
        else:
            tl.store(y + place, rounded, mask=both)
        values = rounded.to(tl.float32)
        squares = values * values
        if BY_PRODUCTS:  # what is outside is zero: so are the taps and the residual there
            ones = tl.full((16, BM), 1.0, kind)
            high = squares.to(kind)
            low = (squares - high.to(tl.float32)).to(kind)
            sums = tl.sum(tl.dot(ones, rounded), 0) / 16
            square_sums = tl.sum(tl.dot(ones, low, tl.dot(ones, high)), 0) / 16
        else:
            sums, square_sums = tl.sum(values, 0), tl.sum(squares, 0)
        mean = sums / count
        tl.store(parts + program * 2 * O + o, mean, mask=o < O)
        tl.store(parts + program * 2 * O + O + o, square_sums - sums * mean, mask=o < O)


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
    variance = tl.maximum(tl.sum(second, 0) / positions - shift * shift, 0.0)
    scale = tl.load(gamma + c, mask=known, other=0.0) / tl.sqrt(variance + epsilon)
    tl.store(statistics + c, mean, mask=known)
    tl.store(statistics + C + c, variance, mask=known)
    tl.store(coefficients + c, scale, mask=known)
    tl.store(coefficients + C + c, tl.load(beta + c, mask=known, other=0.0) - mean * scale, mask=known)


@triton.jit
def read(pointers, known, EVEN: tl.constexpr):
    """Return what pointers show, and zero where it is not known; ``EVEN`` says that all of it is."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=known, other=0.0)


@triton.jit
def activated(values, coefficients, c, known, C: tl.constexpr, EVEN: tl.constexpr):
    """Return relu(scale x + shift) in the type of x, and zero where x is not known."""
    scale = read(coefficients + c, c < C, EVEN)
    shift = read(coefficients + C + c, c < C, EVEN)
    active = tl.maximum(values.to(tl.float32) * scale[None, :] + shift[None, :], 0.0)
    if not EVEN:
        active = tl.where(known, active, 0.0)
    return active.to(values.dtype)


@triton.jit
def _along_width(spread, m, w, r, inside, W: tl.constexpr, R: tl.constexpr):
    """Return the sum of the three taps at the positions m, in the type of what is added."""
    place = spread + m[:, None] * (3 * R) + r[None, :]
    left = tl.load(place - 3 * R, mask=(inside & (w > 0))[:, None], other=0.0)
    own = tl.load(place + R, mask=inside[:, None], other=0.0)
    right = tl.load(place + 5 * R, mask=(inside & (w < W - 1))[:, None], other=0.0)
    return (left.to(tl.float32) + own.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
