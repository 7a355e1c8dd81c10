"""The GPU kernels of thin convolutions: a convolution along one dimension, and the gradient of its weight.

All tensors of activations are channels-last. A *thin* tensor has as many channels as the rank, rounded up, with zeros
behind the rank. A program handles a tile of positions; sums over positions are stored per program and added up
afterwards in a fixed order, so that results do not vary from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Sizes for which no kernel of its own is built: layers of a network share kernels.
SIZES = ("positions", "height", "width", "seen_height", "seen_width")
SUM_SIZES = (
    *("programs", "span", "wide_positions", "wide_height", "wide_width", "thin_height", "thin_width"),
    *("rank", "split_size"),
)


@triton.jit(do_not_specialize=["rows_of_U", "rows", "rank", "pitch"])
def pack_kernel(
    U,  # (rows of U, rank)
    V,  # (other rows, rank)
    packed,  # (rows, pitch), written
    rows_of_U,
    rows,
    rank,
    pitch,
    SIZE: tl.constexpr,
):
    """Write both factors, one after the other, in the type of the activations and with zeros behind the rank."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row, r = place // pitch, place % pitch
    in_U = row < rows_of_U
    left = tl.load(U + row * rank + r, mask=in_U & (r < rank), other=0.0)
    right = tl.load(V + (row - rows_of_U) * rank + r, mask=(row >= rows_of_U) & (row < rows) & (r < rank), other=0.0)
    tl.store(packed + place, tl.where(in_U, left, right).to(packed.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=[*SIZES, "others"])
def convolve_kernel(
    x,  # (seen positions, inputs)
    weight,
    y,  # (positions, outputs), written
    positions,
    height,
    width,
    seen_height,
    seen_width,
    inputs,
    outputs,
    by_tap,  # strides of the weight
    by_input,
    by_output,
    stride,
    padding,
    ALONG_HEIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TAPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    others=0,  # programs that come first in this launch and do something else
):
    """Write the convolution of ``x`` along one dimension, or the transposed one."""
    program = tl.program_id(0) - others
    tiles = tl.cdiv(outputs, BN)
    m = (program // tiles) * BM + tl.arange(0, BM)
    j = (program % tiles) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    chunks = tl.cdiv(inputs, BC)
    for turn in range(TAPS * chunks):
        tap = turn // chunks
        c = (turn % chunks) * BC + tl.arange(0, BC)
        # fmt: off
        part = _load_seen(x, m, c, tap, positions, inputs, height, width, seen_height, seen_width, stride, padding,
                          ALONG_HEIGHT, TRANSPOSED)
        # fmt: on
        matrix = tl.load(
            weight + tap * by_tap + c[:, None] * by_input + j[None, :] * by_output,
            mask=(c[:, None] < inputs) & (j[None, :] < outputs),
            other=0.0,
        )
        total = tl.dot(part, matrix.to(part.dtype), total)
    tl.store(
        y + m[:, None] * outputs + j[None, :],
        total.to(y.dtype.element_ty),
        mask=(m[:, None] < positions) & (j[None, :] < outputs),
    )


@triton.jit(do_not_specialize=[*SIZES, *SUM_SIZES])
def gradients_kernel(
    # of the convolution, see ``convolve_kernel``
    x,
    weight,
    y,
    positions,
    height,
    width,
    seen_height,
    seen_width,
    inputs,
    outputs,
    by_tap,
    by_input,
    by_output,
    stride,
    padding,
    # of the weight's gradient
    wide,  # (wide positions, wide channels)
    thin,  # (thin positions, thin channels)
    sums,  # (splits, all weights), written
    programs,  # of the weight's gradient, which are the longer ones and come first
    span,  # positions of a split, a multiple of GM
    wide_positions,
    wide_height,
    wide_width,
    thin_height,
    thin_width,
    wide_channels,
    thin_channels,
    rank,
    split_size,  # entries of sums from one split to the next
    ALONG_HEIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SEEN_TRANSPOSED: tl.constexpr,
    TAPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    GM: tl.constexpr,
    GW: tl.constexpr,
    GR: tl.constexpr,
):
    """Do what ``convolve_kernel`` does, and in other programs write sums of wide times thin channels for every tap."""
    program = tl.program_id(0)
    # fmt: off
    if program >= programs:
        convolve_kernel(x, weight, y, positions, height, width, seen_height, seen_width, inputs, outputs,
                        by_tap, by_input, by_output, stride, padding, ALONG_HEIGHT, TRANSPOSED, TAPS, BM, BN, BC,
                        programs)
    else:
        wide_tiles, thin_tiles = tl.cdiv(wide_channels, GW), tl.cdiv(rank, GR)
        split = program // (wide_tiles * thin_tiles)
        i = (program // thin_tiles % wide_tiles) * GW + tl.arange(0, GW)
        r = (program % thin_tiles) * GR + tl.arange(0, GR)
        total0 = tl.zeros((GW, GR), dtype=tl.float32)
        total1 = tl.zeros((GW, GR), dtype=tl.float32)
        total2 = tl.zeros((GW, GR), dtype=tl.float32)
        end = tl.minimum((split + 1) * span, wide_positions)
        for start in range(split * span, end, GM):
            m = start + tl.arange(0, GM)
            mask = (m[:, None] < end) & (i[None, :] < wide_channels)
            a = tl.trans(tl.load(wide + m[:, None] * wide_channels + i[None, :], mask=mask, other=0.0))
            total0 = tl.dot(a, _load_seen(thin, m, r, 0, end, thin_channels, wide_height, wide_width, thin_height,
                                          thin_width, stride, padding, ALONG_HEIGHT, SEEN_TRANSPOSED), total0)
            total1 = tl.dot(a, _load_seen(thin, m, r, 1, end, thin_channels, wide_height, wide_width, thin_height,
                                          thin_width, stride, padding, ALONG_HEIGHT, SEEN_TRANSPOSED), total1)
            total2 = tl.dot(a, _load_seen(thin, m, r, 2, end, thin_channels, wide_height, wide_width, thin_height,
                                          thin_width, stride, padding, ALONG_HEIGHT, SEEN_TRANSPOSED), total2)
        place = sums + split * split_size + i[:, None] * (TAPS * rank) + r[None, :]
        known = (i[:, None] < wide_channels) & (r[None, :] < rank)
        tl.store(place, total0, mask=known)
        tl.store(place + rank, total1, mask=known)
        tl.store(place + 2 * rank, total2, mask=known)
    # fmt: on


@triton.jit
def _load_seen(
    x, m, c, tap, end, channels, height, width, seen_height, seen_width, stride, padding,
    ALONG_HEIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Return the channels ``c`` of what a tap sees of ``x`` from the positions ``m`` below ``end``; zeros outside."""
    n, h, w = m // (height * width), m // width % height, m % width
    own, extent = (h, seen_height) if ALONG_HEIGHT else (w, seen_width)
    if TRANSPOSED:
        steps = own + padding - tap
        other = steps // stride
        inside = (steps >= 0) & (steps % stride == 0) & (other < extent)
    else:
        other = own * stride + tap - padding
        inside = (other >= 0) & (other < extent)
    place = (n * seen_height + other) * seen_width + w if ALONG_HEIGHT else (n * seen_height + h) * seen_width + other
    mask = (inside & (m < end))[:, None] & (c[None, :] < channels)
    return tl.load(x + place[:, None] * channels + c[None, :], mask=mask, other=0.0)
