"""GPU kernels of batch normalization, the sum with a shortcut, and ReLU.

Tensors are channels-last, seen as (positions, channels), as in ``kernels.py``. A tile is read and written whole, with
its channels' scale and shift in registers: the compiler's kernels compute these again for every number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from factorized.experiments.models.normalized.kernels import positive, read, walk


@triton.jit
def measure_kernel(
    x,  # (positions, C)
    parts,  # (splits, 2, C), written: means and sums of squared distances from them
    positions,
    span,  # positions of a split, a multiple of GM
    C: tl.constexpr,
    EVEN: tl.constexpr,
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    """Describe x for a norm."""
    split, c = walk(tl.program_id(0), C, GC)
    about = tl.load(x + split * span * C + c, mask=c < C, other=0.0).to(tl.float32)  # so that squares are small
    sums = tl.zeros((GM, GC), dtype=tl.float32)  # added up at the end: sums across threads take long
    squares = tl.zeros((GM, GC), dtype=tl.float32)
    end = tl.minimum((split + 1) * span, positions)
    for start in range(split * span, end, GM):
        place, known = tile(start, c, end, C, GM)
        away = read(x + place, known, EVEN).to(tl.float32) - about[None, :]
        if not EVEN:
            away = tl.where(known, away, 0.0)
        sums += away
        squares += away * away
    mean = tl.sum(sums, 0) / (end - split * span).to(tl.float32)
    tl.store(parts + split * 2 * C + c, mean + about, mask=c < C)
    tl.store(parts + split * 2 * C + C + c, tl.sum(squares, 0) - tl.sum(sums, 0) * mean, mask=c < C)


@triton.jit
def activate_kernel(
    x,  # (positions, C)
    coefficients,  # (2, C): scale and shift
    shortcut,  # (positions, C)
    y,  # (positions, C), written
    positions,
    C: tl.constexpr,
    SHORTCUT: tl.constexpr,
    EVEN: tl.constexpr,
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    """Write relu(scale x + shift + shortcut)."""
    split, c = walk(tl.program_id(0), C, GC)
    scale, shift = read(coefficients + c, c < C, EVEN), read(coefficients + C + c, c < C, EVEN)
    place, known = tile(split * GM, c, positions, C, GM)
    values = read(x + place, known, EVEN).to(tl.float32) * scale[None, :] + shift[None, :]
    if SHORTCUT:
        values += read(shortcut + place, known, EVEN).to(tl.float32)
    write(y + place, positive(values), known, EVEN)


@triton.jit
def activation_sums_kernel(
    gradient,  # (positions, C), of y
    x,  # (positions, C)
    y,  # (positions, C)
    coefficients,  # (2, C)
    statistics,  # (2, C)
    passed,  # (positions, C), written with a shortcut: what ReLU lets through of the gradient
    parts,  # (splits, 2, C), written: parts of the gradients of beta and gamma
    positions,
    span,  # positions of a split, a multiple of GM
    epsilon,
    C: tl.constexpr,
    SHORTCUT: tl.constexpr,
    EVEN: tl.constexpr,
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    """Sum up the gradients of gamma and beta."""
    split, c = walk(tl.program_id(0), C, GC)
    scale, shift = read(coefficients + c, c < C, EVEN), read(coefficients + C + c, c < C, EVEN)
    mean = read(statistics + c, c < C, EVEN)
    of_beta = tl.zeros((GM, GC), dtype=tl.float32)
    of_gamma = tl.zeros((GM, GC), dtype=tl.float32)
    end = tl.minimum((split + 1) * span, positions)
    for start in range(split * span, end, GM):
        place, known = tile(start, c, end, C, GM)
        values = read(x + place, known, EVEN).to(tl.float32)
        g = read(gradient + place, known, EVEN).to(tl.float32)
        if SHORTCUT:
            g = tl.where(read(y + place, known, EVEN) > 0, g, 0.0)
            write(passed + place, g, known, EVEN)
        else:
            g = tl.where(values * scale[None, :] + shift[None, :] > 0, g, 0.0)
        of_beta += g
        of_gamma += g * (values - mean[None, :])
    inverse = 1.0 / tl.sqrt(read(statistics + C + c, c < C, EVEN) + epsilon)
    tl.store(parts + split * 2 * C + c, tl.sum(of_beta, 0), mask=c < C)
    tl.store(parts + split * 2 * C + C + c, tl.sum(of_gamma, 0) * inverse, mask=c < C)


@triton.jit
def activation_gradient_kernel(
    gradient,  # (positions, C), of y; with a shortcut what ReLU lets through of it
    x,  # (positions, C)
    coefficients,  # (2, C)
    back,  # (3, C): what the gradient, the input and 1 are multiplied by
    x_gradient,  # (positions, C), written
    positions,
    C: tl.constexpr,
    SHORTCUT: tl.constexpr,
    EVEN: tl.constexpr,
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    """Go back through ReLU and batch normalization."""
    split, c = walk(tl.program_id(0), C, GC)
    by_gradient = read(back + c, c < C, EVEN)
    by_input = read(back + C + c, c < C, EVEN)
    constant = read(back + 2 * C + c, c < C, EVEN)
    place, known = tile(split * GM, c, positions, C, GM)
    values = read(x + place, known, EVEN).to(tl.float32)
    g = read(gradient + place, known, EVEN).to(tl.float32)
    if not SHORTCUT:
        scale, shift = read(coefficients + c, c < C, EVEN), read(coefficients + C + c, c < C, EVEN)
        g = tl.where(values * scale[None, :] + shift[None, :] > 0, g, 0.0)
    total = g * by_gradient[None, :] + values * by_input[None, :] + constant[None, :]
    write(x_gradient + place, total, known, EVEN)


@triton.jit
def tile(start, c, end, C: tl.constexpr, GM: tl.constexpr):
    """Return the places of GM positions from ``start`` on, and which of them are before ``end``."""
    m = start + tl.arange(0, GM)
    return m[:, None] * C + c[None, :], (m < end)[:, None] & (c[None, :] < C)


@triton.jit
def write(pointers, values, known, EVEN: tl.constexpr):
    """Store values in the type of the pointers, where they are known; ``EVEN`` says that all of them are."""
    if EVEN:
        tl.store(pointers, values.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=known)
