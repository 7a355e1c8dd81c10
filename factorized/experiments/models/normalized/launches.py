"""Launches of the kernels that normalize."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factorized.experiments.models.normalized import tiles
from factorized.formats.launches import Launch

AT_ONCE = 1024  # numbers that a program packs


def measuring(
    x: Tensor,  # (batch, channels, height, width), channels-last
    parts: Tensor,  # written: those of its statistics
) -> Launch:
    """Describe a tensor for a norm."""
    from factorized.experiments.models.normalized.activation_kernels import measure_kernel

    walk = tiles.TILES.stream(x)
    given = (x, parts, x.numel() // x.shape[1], walk.span)
    return Launch(measure_kernel, walk.programs, given, {**walk.sizes(x), "num_warps": tiles.TILES.stream_warps})


def joining(
    known: tuple[Tensor, int],  # parts of the statistics of a tensor, and of how many positions each is
    positions: int,
    norm: tuple[Tensor, Tensor, float],  # gamma, beta, epsilon
    running: tuple[Tensor, Tensor, float] | None,  # mean and variance, which follow by a momentum
    found: tuple[Tensor, Tensor],  # written: statistics, coefficients
) -> Launch:
    """Join parts of statistics, and find what normalizes by them."""
    from factorized.experiments.models.normalized.kernels import statistics_kernel

    (parts, each), (gamma, beta, epsilon) = known, norm
    mean, variance, momentum = running or (*found, 0.0)
    given = (parts, gamma, beta, *found, mean, variance, len(parts), positions, each, momentum, epsilon)
    sizes = {"C": parts.shape[2], "RUNNING": running is not None, "BP": 256, "BC": 8}
    return Launch(statistics_kernel, -(-parts.shape[2] // 8), given, sizes)


def joining_gradients(
    parts: Tensor,  # of the gradients of beta and gamma
    positions: int,
    norm: tuple[Tensor, Tensor, float],  # statistics, coefficients, epsilon
    found: tuple[Tensor, Tensor],  # written: the gradients; what that of the input is made of
) -> Launch:
    """Join parts of gradients."""
    from factorized.experiments.models.normalized.gradient_kernels import norm_coefficients_kernel

    statistics, coefficients, epsilon = norm
    given = (parts, statistics, coefficients, *found, len(parts), positions, epsilon)
    return Launch(norm_coefficients_kernel, -(-parts.shape[2] // 8), given, {"C": parts.shape[2], "BP": 128, "BC": 8})


def activation_launches(
    x: Tensor,  # (batch, channels, height, width), channels-last
    coefficients: Tensor,  # (2, channels): scale and shift
    shortcut: Tensor | None,
    y: Tensor,  # written
) -> list[Launch]:
    """Normalize x, add the shortcut, and activate."""
    from factorized.experiments.models.normalized.activation_kernels import activate_kernel

    cover = tiles.TILES.cover(x)
    given = (x, coefficients, x if shortcut is None else shortcut, y, x.numel() // x.shape[1])
    told = {"SHORTCUT": shortcut is not None, "num_warps": tiles.TILES.cover_warps}
    return [Launch(activate_kernel, cover.programs, given, {**cover.sizes(x), **told})]


def activation_gradient_launches(
    gradient: Tensor,  # of y
    x: Tensor,
    y: Tensor | None,  # the result, if there was a shortcut
    statistics: Tensor,
    coefficients: Tensor,
    epsilon: float,
    of_x: Tensor,  # written
    passed: Tensor,  # written where there is y
    of_norm: Tensor,  # written
) -> list[Launch]:
    """Go back to x, the shortcut, beta and gamma."""
    from factorized.experiments.models.normalized import activation_kernels as kernels

    positions, sizes = x.numel() // x.shape[1], tiles.TILES
    cover, walk = sizes.cover(x), sizes.stream(x)
    parts = statistics.new_empty((walk.splits, *statistics.shape))
    back = statistics.new_empty((3, x.shape[1]))
    seen, written = (x, x) if y is None else (y, passed)  # as good as any where the kernel uses none
    summed = (gradient, x, seen, coefficients, statistics, written, parts, positions, walk.span, epsilon)
    last = (gradient if y is None else passed, x, coefficients, back, of_x, positions)
    own = {"SHORTCUT": y is not None}
    return [
        Launch(
            kernels.activation_sums_kernel,
            walk.programs,
            summed,
            {**own, **walk.sizes(x), "num_warps": sizes.stream_warps},
        ),
        joining_gradients(parts, positions, (statistics, coefficients, epsilon), (of_norm, back)),
        Launch(
            kernels.activation_gradient_kernel,
            cover.programs,
            last,
            {**own, **cover.sizes(x), "num_warps": sizes.cover_warps},
        ),
    ]


def forward_launches(
    x: Tensor,  # (batch, channels, height, width), channels-last
    coefficients: Tensor,  # (2, channels): scale and shift of the norm
    factors: tuple[Tensor, Tensor],  # U, V
    residual: Tensor | None,
    results: Sequence[Tensor],  # written: y, parts of its statistics, the thin tensor, packed factors
) -> list[Launch]:
    """Normalize, activate and convolve x, and add the residual."""
    from factorized.experiments.models.normalized import kernels
    from factorized.formats.thin_kernels import pack_kernel

    (U, V), (y, parts, thin, packed) = factors, results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: len(U)], packed[len(U) :]
    packing = (U.contiguous(), V.contiguous(), packed, len(U), len(packed), U.shape[1], R)
    (bm, bc), walk = tiles.TILES.tile(x), tiles.TILES.walk(y)
    each = bm // width * width  # positions of a program: whole rows of images
    even = bm == each and positions % bm == 0 and channels % bc == 0
    sizes = {"W": width, "R": R}
    return [
        Launch(pack_kernel, -(-packed.numel() // AT_ONCE), packing, {"SIZE": AT_ONCE}),
        Launch(
            kernels.project_kernel,
            -(-positions // each),
            (x, coefficients, own_V, thin, positions),
            {**sizes, "C": channels, "EVEN": even, "ROWS": bm // width, "BM": bm, "BC": bc, **tiles.TILES.launching},
        ),
        Launch(
            kernels.expand_kernel,
            walk.programs,
            (thin, own_U, y if residual is None else residual, y, parts, positions, walk.span),
            {**sizes, "H": height, "RESIDUAL": residual is not None, **walk.sizes(y), **tiles.TILES.walking},
        ),
    ]


def backward_launches(
    gradient: Tensor,  # of y
    x: Tensor,
    kept: Sequence[Tensor],  # thin tensor, packed factors, statistics, coefficients
    epsilon: float,
    residual: Tensor | None,  # gradient that is added to that of x
    results: Sequence[Tensor],  # written: the gradients of x, of U and V in parts, of beta and gamma
) -> list[Launch]:
    """Go back to x and the parameters."""
    from factorized.experiments.models.normalized import gradient_kernels as kernels

    thin, packed, statistics, coefficients = kept
    x_gradient, of_U, of_V, of_norm = results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: 3 * channels], packed[3 * channels :]
    thin_gradient, back = torch.empty_like(thin), statistics.new_empty((3, channels))
    parts = statistics.new_empty((len(of_V), 2, channels))
    (bm, bc), walk, summing = tiles.TILES.tile(gradient), tiles.TILES.walk(x), tiles.TILES.walk(x, R)
    sizes = {"W": width, "R": R}
    both = {"BM": bm, "BC": bc, "GM": summing.positions, "GC": summing.channels}
    return [
        Launch(
            kernels.thin_gradients_kernel,
            summing.programs - (-positions // bm),
            (gradient, thin, own_U, thin_gradient, of_U, positions, summing.span, summing.programs),
            {**sizes, "H": height, "O": channels, **both, **tiles.TILES.launching},
        ),
        Launch(
            kernels.norm_sums_kernel,
            summing.programs,
            (x, coefficients, statistics, own_V, thin_gradient, of_V, parts, positions, summing.span, epsilon),
            {**sizes, **summing.sizes(x), **tiles.TILES.walking},
        ),
        joining_gradients(parts, positions, (statistics, coefficients, epsilon), (of_norm, back)),
        Launch(
            kernels.input_gradient_kernel,
            walk.programs,
            (
                *(x, coefficients, back, own_V, thin_gradient),
                *(x_gradient if residual is None else residual, x_gradient, positions, walk.span),
            ),
            {**sizes, "RESIDUAL": residual is not None, **walk.sizes(x), **tiles.TILES.walking},
        ),
    ]
