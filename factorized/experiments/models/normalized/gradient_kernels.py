"""GPU kernels of the gradients of a convolution after batch normalization and ReLU; see ``kernels.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from factorized.experiments.models.normalized.kernels import activated, read, taps_of, walk


@triton.jit
def thin_gradients_kernel(
    gradient,  # (positions, O), of y
    thin,  # (positions, R)
    U,  # (O·3, R)
    thin_gradient,  # (positions, R), written
    sums,  # (splits, O·3, R), written: parts of the gradient of U
    positions,
    span,  # positions of a split, a multiple of GM
    programs,  # of the gradient of U, which are the longer ones and come first
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    """Go back along the height into the thin gradient; in other programs sum up the gradient of U."""
    program = tl.program_id(0)
    if program < programs:
        _sum_of_U(program, gradient, thin, sums, positions, span, H, W, O, R, GM, GC)
    else:
        _back_along_height(program - programs, gradient, U, thin_gradient, positions, H, W, O, R, BM, BC)


@triton.jit
def _back_along_height(
    program,
    gradient,
    U,
    thin_gradient,
    positions,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    m = program * BM + tl.arange(0, BM)
    h = m // W % H
    r = tl.arange(0, R)
    total = tl.zeros((BM, R), dtype=tl.float32)
    chunks: tl.constexpr = (O + BC - 1) // BC
    for turn in range(3 * chunks):
        tap = turn % 3
        o = (turn // 3) * BC + tl.arange(0, BC)
        row = h + 1 - tap
        inside = (m < positions) & (row >= 0) & (row < H)
        part = tl.load(
            gradient + (m + (1 - tap) * W)[:, None] * O + o[None, :],
            mask=inside[:, None] & (o[None, :] < O),
            other=0.0,
        )
        matrix = tl.load(U + o[:, None] * (3 * R) + tap * R + r[None, :], mask=o[:, None] < O, other=0.0)
        total = tl.dot(part, matrix, total)
    tl.store(
        thin_gradient + m[:, None] * R + r[None, :],
        total.to(thin_gradient.dtype.element_ty),
        mask=(m < positions)[:, None],
    )


@triton.jit
def _sum_of_U(
    program,
    gradient,
    thin,
    sums,
    positions,
    span,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    split, o = walk(program, O, GC)
    r = tl.arange(0, R)
    total0 = tl.zeros((GC, R), dtype=tl.float32)
    total1 = tl.zeros((GC, R), dtype=tl.float32)
    total2 = tl.zeros((GC, R), dtype=tl.float32)
    end = tl.minimum((split + 1) * span, positions)
    ahead = _tile(gradient, split * span, o, end, O, GM)
    for start in range(split * span, end, GM):
        wide = tl.trans(ahead)
        ahead = _tile(gradient, start + GM, o, end, O, GM)
        m = start + tl.arange(0, GM)
        h = m // W % H
        place = thin + m[:, None] * R + r[None, :]
        above = tl.load(place - W * R, mask=((m < end) & (h > 0))[:, None], other=0.0)
        own = tl.load(place, mask=(m < end)[:, None], other=0.0)
        below = tl.load(place + W * R, mask=((m < end) & (h < H - 1))[:, None], other=0.0)
        total0 = tl.dot(wide, above, total0)
        total1 = tl.dot(wide, own, total1)
        total2 = tl.dot(wide, below, total2)
    place = sums + split * (3 * O * R) + o[:, None] * (3 * R) + r[None, :]
    tl.store(place, total0, mask=o[:, None] < O)
    tl.store(place + R, total1, mask=o[:, None] < O)
    tl.store(place + 2 * R, total2, mask=o[:, None] < O)


@triton.jit
def norm_sums_kernel(
    x,  # (positions, C)
    coefficients,  # (2, C)
    statistics,  # (2, C)
    V,  # (C·3, R)
    thin_gradient,  # (positions, R)
    sums,  # (splits, C·3, R), written: parts of the gradient of V
    parts,  # (splits, 2, C), written: parts of the gradients of beta and gamma
    positions,
    span,  # positions of a split, a multiple of GM
    epsilon,
    W: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,  # tiles that are read ahead
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    """Sum up the gradients of V, gamma and beta; the gradient of the normalized input is computed and not stored."""
    split, c = walk(tl.program_id(0), C, GC)
    r = tl.arange(0, R)
    V0, V1, V2 = taps_of(V, c, r, C, R, EVEN)
    scale, shift = read(coefficients + c, c < C, EVEN), read(coefficients + C + c, c < C, EVEN)
    mean = read(statistics + c, c < C, EVEN)
    inverse = 1.0 / tl.sqrt(read(statistics + C + c, c < C, EVEN) + epsilon)
    total0 = tl.zeros((GC, R), dtype=tl.float32)
    total1 = tl.zeros((GC, R), dtype=tl.float32)
    total2 = tl.zeros((GC, R), dtype=tl.float32)
    of_beta = tl.zeros((GM, GC), dtype=tl.float32)  # added up at the end: sums across threads take long
    of_gamma = tl.zeros((GM, GC), dtype=tl.float32)
    end = tl.minimum((split + 1) * span, positions)
    ahead = _tile(x, split * span, c, end, C, GM)  # the compiler reads ahead only what goes to products as it is
    for start in tl.range(split * span, end, GM, num_stages=AHEAD):
        values = ahead
        ahead = _tile(x, start + GM, c, end, C, GM)
        m = start + tl.arange(0, GM)
        known = (m < end)[:, None] & (c[None, :] < C)
        active = activated(values, scale, shift, known, EVEN)
        right, own, left = _seen_back(thin_gradient, m, r, m < end, W, R, EVEN)
        g = tl.dot(right, V0)
        g = tl.dot(own, V1, g)
        g = tl.dot(left, V2, g)
        g = tl.where(active > 0, g, 0.0)
        of_beta += g
        of_gamma += g * (values.to(tl.float32) - mean[None, :])
        wide = tl.trans(active)
        total0 = tl.dot(wide, right, total0)
        total1 = tl.dot(wide, own, total1)
        total2 = tl.dot(wide, left, total2)
    place = sums + split * (3 * C * R) + c[:, None] * (3 * R) + r[None, :]
    tl.store(place, total0, mask=c[:, None] < C)
    tl.store(place + R, total1, mask=c[:, None] < C)
    tl.store(place + 2 * R, total2, mask=c[:, None] < C)
    tl.store(parts + split * 2 * C + c, tl.sum(of_beta, 0), mask=c < C)
    tl.store(parts + split * 2 * C + C + c, tl.sum(of_gamma, 0) * inverse, mask=c < C)


@triton.jit(do_not_specialize=["splits", "positions"])
def norm_coefficients_kernel(
    parts,  # (splits, 2, C)
    statistics,  # (2, C)
    coefficients,  # (2, C)
    gradients,  # (2, C), written: of beta and gamma
    back,  # (3, C), written: what the gradient, the input and 1 are multiplied by
    splits,
    positions,
    epsilon,
    C: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Join the parts of the gradients of beta and gamma, and write what the gradient of the input is made of."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    of_beta = tl.zeros((BC,), dtype=tl.float32)
    of_gamma = tl.zeros((BC,), dtype=tl.float32)
    for start in range(0, splits, BP):
        p = start + tl.arange(0, BP)
        both = (p[:, None] < splits) & known[None, :]
        place = parts + p[:, None] * 2 * C + c[None, :]
        of_beta += tl.sum(tl.load(place, mask=both, other=0.0), 0)
        of_gamma += tl.sum(tl.load(place + C, mask=both, other=0.0), 0)
    mean = tl.load(statistics + c, mask=known, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.load(statistics + C + c, mask=known, other=1.0) + epsilon)
    scale = tl.load(coefficients + c, mask=known, other=0.0)
    by_input = -scale * inverse * of_gamma / positions
    tl.store(gradients + c, of_beta, mask=known)
    tl.store(gradients + C + c, of_gamma, mask=known)
    tl.store(back + c, scale, mask=known)
    tl.store(back + C + c, by_input, mask=known)
    tl.store(back + 2 * C + c, -scale * of_beta / positions - by_input * mean, mask=known)


@triton.jit
def input_gradient_kernel(
    x,  # (positions, C)
    coefficients,  # (2, C)
    back,  # (3, C)
    V,  # (C·3, R)
    thin_gradient,  # (positions, R)
    residual,  # (positions, C), added to the result
    x_gradient,  # (positions, C), written
    positions,
    span,  # positions of a split, a multiple of GM
    W: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    GM: tl.constexpr,
    GC: tl.constexpr,
):
    """Go back along the width, and through ReLU and batch normalization."""
    split, c = walk(tl.program_id(0), C, GC)
    r = tl.arange(0, R)
    V0, V1, V2 = taps_of(V, c, r, C, R, EVEN)
    scale, shift = read(coefficients + c, c < C, EVEN), read(coefficients + C + c, c < C, EVEN)
    by_gradient = read(back + c, c < C, EVEN)
    by_input = read(back + C + c, c < C, EVEN)
    constant = read(back + 2 * C + c, c < C, EVEN)
    end = tl.minimum((split + 1) * span, positions)
    for start in tl.range(split * span, end, GM, num_stages=AHEAD):
        m = start + tl.arange(0, GM)
        place = m[:, None] * C + c[None, :]
        known = (m < end)[:, None] & (c[None, :] < C)
        values = read(x + place, known, EVEN)
        right, own, left = _seen_back(thin_gradient, m, r, m < end, W, R, EVEN)
        g = tl.dot(right, V0)
        g = tl.dot(own, V1, g)
        g = tl.dot(left, V2, g)
        g = tl.where(activated(values, scale, shift, known, EVEN) > 0, g, 0.0)
        total = g * by_gradient[None, :] + values.to(tl.float32) * by_input[None, :] + constant[None, :]
        if RESIDUAL:
            total += read(residual + place, known, EVEN)
        total = total.to(x_gradient.dtype.element_ty)
        if EVEN:
            tl.store(x_gradient + place, total)
        else:
            tl.store(x_gradient + place, total, mask=known)


@triton.jit
def _tile(wide, start, channels, end, C: tl.constexpr, GM: tl.constexpr):
    """Return GM positions of a wide tensor from ``start`` on, and zeros from ``end`` on."""
    m = start + tl.arange(0, GM)
    known = (m < end)[:, None] & (channels[None, :] < C)
    return tl.load(wide + m[:, None] * C + channels[None, :], mask=known, other=0.0)


@triton.jit
def _seen_back(thin_gradient, m, r, inside, W: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr):
    """Return the thin gradient at the positions that saw m by their first, second and third tap."""
    w = m % W
    place = thin_gradient + m[:, None] * R + r[None, :]
    right = tl.load(place + R, mask=(inside & (w < W - 1))[:, None], other=0.0)
    own = read(place, inside[:, None], EVEN)
    left = tl.load(place - R, mask=(inside & (w > 0))[:, None], other=0.0)
    return right, own, left
