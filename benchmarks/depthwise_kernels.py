"""GPU kernels of depthwise 3×3 convolutions, channels-last, with stride 1 and padding 1; see ``benchmarks.depthwise``.

A program handles some channels of a run of positions. Taps are read and sums are kept in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("positions", "height", "width")  # layers of a network share kernels


@triton.jit(do_not_specialize=[*SIZES])
def forward_kernel(
    x,  # (positions, channels)
    taps,  # (channels, 9)
    y,  # (positions, channels), written
    positions,
    height,
    width,
    channels,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Write the convolution of ``x``."""
    tiles = tl.cdiv(channels, BC)
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    c = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    total = tl.zeros((BM, BC), dtype=tl.float32)
    for tap in tl.static_range(9):
        seen = _neighbours(x, m, c, tap // 3 - 1, tap % 3 - 1, positions, height, width, channels)
        total += seen * _tap(taps, c, tap, channels)
    mask = (m < positions)[:, None] & (c < channels)[None, :]
    tl.store(y + m[:, None] * channels + c[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=[*SIZES, "span"])
def backward_kernel(
    gradient,  # of y
    x,  # (positions, channels)
    taps,  # (channels, 9)
    x_gradient,  # (positions, channels), written
    sums,  # (runs, channels, 9), written: parts of the gradient of the taps
    positions,
    height,
    width,
    span,  # positions of a run, a multiple of BM
    channels,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Write the gradient of ``x`` and the sums of a run: both need the same nine neighbours of ``gradient``."""
    tiles = tl.cdiv(channels, BC)
    run = tl.program_id(0) // tiles
    c = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    t0, t1, t2 = _tap(taps, c, 0, channels), _tap(taps, c, 1, channels), _tap(taps, c, 2, channels)
    t3, t4, t5 = _tap(taps, c, 3, channels), _tap(taps, c, 4, channels), _tap(taps, c, 5, channels)
    t6, t7, t8 = _tap(taps, c, 6, channels), _tap(taps, c, 7, channels), _tap(taps, c, 8, channels)
    s0 = tl.zeros((BM, BC), dtype=tl.float32)
    s1, s2, s3, s4, s5, s6, s7, s8 = s0, s0, s0, s0, s0, s0, s0, s0
    end = tl.minimum((run + 1) * span, positions)
    for start in range(run * span, end, BM):
        m = start + tl.arange(0, BM)
        mask = (m < end)[:, None] & (c < channels)[None, :]
        place = m[:, None] * channels + c[None, :]
        own = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        # fmt: off
        seen = _neighbours(gradient, m, c, 1, 1, positions, height, width, channels)
        total, s0 = seen * t0, s0 + seen * own
        seen = _neighbours(gradient, m, c, 1, 0, positions, height, width, channels)
        total, s1 = total + seen * t1, s1 + seen * own
        seen = _neighbours(gradient, m, c, 1, -1, positions, height, width, channels)
        total, s2 = total + seen * t2, s2 + seen * own
        seen = _neighbours(gradient, m, c, 0, 1, positions, height, width, channels)
        total, s3 = total + seen * t3, s3 + seen * own
        seen = _neighbours(gradient, m, c, 0, 0, positions, height, width, channels)
        total, s4 = total + seen * t4, s4 + seen * own
        seen = _neighbours(gradient, m, c, 0, -1, positions, height, width, channels)
        total, s5 = total + seen * t5, s5 + seen * own
        seen = _neighbours(gradient, m, c, -1, 1, positions, height, width, channels)
        total, s6 = total + seen * t6, s6 + seen * own
        seen = _neighbours(gradient, m, c, -1, 0, positions, height, width, channels)
        total, s7 = total + seen * t7, s7 + seen * own
        seen = _neighbours(gradient, m, c, -1, -1, positions, height, width, channels)
        total, s8 = total + seen * t8, s8 + seen * own
        # fmt: on
        tl.store(x_gradient + place, total.to(x_gradient.dtype.element_ty), mask=mask)
    found = sums + (run * channels + c) * 9
    tl.store(found + 0, tl.sum(s0, 0), mask=c < channels)
    tl.store(found + 1, tl.sum(s1, 0), mask=c < channels)
    tl.store(found + 2, tl.sum(s2, 0), mask=c < channels)
    tl.store(found + 3, tl.sum(s3, 0), mask=c < channels)
    tl.store(found + 4, tl.sum(s4, 0), mask=c < channels)
    tl.store(found + 5, tl.sum(s5, 0), mask=c < channels)
    tl.store(found + 6, tl.sum(s6, 0), mask=c < channels)
    tl.store(found + 7, tl.sum(s7, 0), mask=c < channels)
    tl.store(found + 8, tl.sum(s8, 0), mask=c < channels)


@triton.jit
def _tap(taps, c, tap, channels):
    """Return one tap of some channels, as a row."""
    return tl.load(taps + c * 9 + tap, mask=c < channels, other=0.0)[None, :]


@triton.jit
def _neighbours(x, m, c, down: tl.constexpr, right: tl.constexpr, positions, height, width, channels):
    """Return some channels of the positions that are so far from ``m``, and zeros outside of the image."""
    h, w = m // width % height + down, m % width + right
    inside = (m < positions) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    place = (m + down * width + right)[:, None] * channels + c[None, :]
    return tl.load(x + place, mask=inside[:, None] & (c < channels)[None, :], other=0.0).to(tl.float32)
