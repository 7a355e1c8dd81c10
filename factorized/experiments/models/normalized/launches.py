"""The launches of convolutions that normalize their input, forward and backward, and the sizes of their tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from factorized.formats.launches import Launch

AT_ONCE = 1024  # numbers that a program packs


@dataclass(frozen=True)
class Tiles:
    """What one program of the kernels handles: positions, and channels at a time."""

    positions: int = 128  # where channels are summed up
    channels: int = 128  # at most; the largest power of two that divides those of a tensor
    programs: int = 128  # at least, where possible
    walk_channels: int = 64  # at most, where a program walks through positions
    walks_fit: bool = True  # whether those channels divide the tensor's; else some tiles are masked
    walk_size: int = 2048  # of a tile there, at most: more would not fit into registers
    walk_programs: int = 264
    ahead: int = 3  # tiles there that are read ahead
    warps: int = 4
    stages: int = 3

    def tile(self, x: Tensor) -> tuple[int, int]:
        """Return the positions and channels of a tile where channels are summed up."""
        rows, positions = self.positions, x.numel() // x.shape[1]
        while rows // 2 >= max(16, x.shape[3]) and positions < rows * self.programs:
            rows //= 2
        return rows, _divisor(x.shape[1], self.channels)

    def walk(self, x: Tensor) -> Walk:
        """Return how programs walk through the positions of a tensor."""
        positions, channels = x.numel() // x.shape[1], self.walk_channels
        if self.walks_fit or x.shape[1] < channels:
            channels = _divisor(x.shape[1], channels)
        tiles, rows = -(-x.shape[1] // channels), min(self.positions, self.walk_size // channels)
        splits = max(1, min(self.walk_programs // tiles, positions // rows))
        span = -(-positions // (splits * rows)) * rows
        return Walk(rows, channels, span, -(-positions // span), tiles)

    @property
    def launching(self) -> dict[str, int]:
        """What every launch is told."""
        return {"num_warps": self.warps, "num_stages": self.stages}


class Walk(NamedTuple):
    """Programs that each walk through a span of positions, for some channels, one tile after another."""

    positions: int  # of a tile
    channels: int
    span: int
    splits: int  # spans
    tiles: int  # of channels

    @property
    def programs(self) -> int:
        """How many there are."""
        return self.splits * self.tiles

    def constants(self, x: Tensor) -> dict[str, Any]:
        """What a launch is told."""
        even = x.numel() // x.shape[1] % self.positions == 0 and x.shape[1] % self.channels == 0
        ahead = {"AHEAD": TILES.ahead, "EVEN": even, "GM": self.positions, "GC": self.channels}
        return {**ahead, **TILES.launching}


def _divisor(extent: int, largest: int) -> int:
    """Return the largest power of two that divides ``extent``, from 16 up to ``largest``."""
    return min(largest, max(16, extent & -extent))


TILES = Tiles()


def forward_launches(
    x: Tensor,  # (batch, channels, height, width), channels-last
    known: tuple[Tensor, int],  # parts of the statistics of x, and of how many positions each is
    parameters: Sequence[Tensor],  # gamma, beta, U, V
    epsilon: float,
    residual: Tensor | None,
    results: Sequence[Tensor],  # written: y, its parts, the thin tensor, packed factors, statistics, coefficients
) -> list[Launch]:
    """Normalize, activate and convolve x, and add the residual."""
    from factorized.experiments.models.normalized import kernels
    from factorized.formats.thin_kernels import pack_kernel

    gamma, beta, U, V = parameters
    y, parts, thin, packed, statistics, coefficients = results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: len(U)], packed[len(U) :]
    packing = (U.contiguous(), V.contiguous(), packed, len(U), len(packed), U.shape[1], R)
    norm = (known[0], gamma, beta, statistics, coefficients, len(known[0]), positions, known[1], epsilon)
    (bm, bc), walk = TILES.tile(x), TILES.walk(y)
    each = bm // width * width  # positions of a program: whole rows of images
    even = bm == each and positions % bm == 0 and channels % bc == 0
    sizes = {"W": width, "R": R}
    return [
        Launch(pack_kernel, -(-packed.numel() // AT_ONCE), packing, {"SIZE": AT_ONCE}),
        Launch(kernels.statistics_kernel, -(-channels // 8), norm, {"C": channels, "BP": 256, "BC": 8}),
        Launch(
            kernels.project_kernel,
            -(-positions // each),
            (x, coefficients, own_V, thin, positions),
            {**sizes, "C": channels, "EVEN": even, "ROWS": bm // width, "BM": bm, "BC": bc, **TILES.launching},
        ),
        Launch(
            kernels.expand_kernel,
            walk.programs,
            (thin, own_U, y if residual is None else residual, y, parts, positions, walk.span),
            {**sizes, "H": height, "O": channels, "RESIDUAL": residual is not None, **walk.constants(y)},
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
    (bm, bc), walk = TILES.tile(gradient), TILES.walk(x)
    sizes, walking = {"W": width, "C": channels, "R": R}, walk.constants(x)
    tiles = {"BM": bm, "BC": bc, "GM": walk.positions, "GC": walk.channels}
    return [
        Launch(
            kernels.thin_gradients_kernel,
            walk.programs - (-positions // bm),
            (gradient, thin, own_U, thin_gradient, of_U, positions, walk.span, walk.programs),
            {"H": height, "W": width, "O": channels, "R": R, **tiles, **TILES.launching},
        ),
        Launch(
            kernels.norm_sums_kernel,
            walk.programs,
            (x, coefficients, statistics, own_V, thin_gradient, of_V, parts, positions, walk.span, epsilon),
            {**sizes, **walking},
        ),
        Launch(
            kernels.norm_coefficients_kernel,
            -(-channels // 8),
            (parts, statistics, coefficients, of_norm, back, len(parts), positions, epsilon),
            {"C": channels, "BP": 128, "BC": 8},
        ),
        Launch(
            kernels.input_gradient_kernel,
            walk.programs,
            (
                *(x, coefficients, back, own_V, thin_gradient),
                *(x_gradient if residual is None else residual, x_gradient, positions, walk.span),
            ),
            {**sizes, "RESIDUAL": residual is not None, **walking},
        ),
    ]
