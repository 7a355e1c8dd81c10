"""The launches of convolutions that normalize their input, forward and backward, and the sizes of their tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factorized.formats.launches import Launch

AT_ONCE = 1024  # numbers that a program packs


@dataclass(frozen=True)
class Tiles:
    """What one program of the kernels handles: positions, and channels at a time."""

    positions: int = 128
    channels: int = 128  # at most; the largest power of two that divides those of a tensor
    programs: int = 128  # at least, where possible
    turns: int = 0  # tiles of channels of one program where a wide tensor is written; 0: all
    sum_channels: int = 64  # at most, where positions are summed up
    sum_size: int = 2048  # of a tile there, at most: more would not fit into registers
    sum_programs: int = 264
    sums_by_products: bool = False  # of what is written, by tensor cores in place of sums across threads
    warps: int = 4
    stages: int = 3

    def tile(self, x: Tensor) -> tuple[int, int]:
        """Return the positions and channels of a tile."""
        rows, positions = self.positions, x.numel() // x.shape[1]
        while rows > 16 and positions < rows * self.programs:
            rows //= 2
        return rows, _divisor(x.shape[1], self.channels)

    def turns_of(self, x: Tensor) -> tuple[int, int]:
        """Return how many tiles of channels a program writes, and how many programs share the channels."""
        tiles = -(-x.shape[1] // self.tile(x)[1])
        turns = min(self.turns or tiles, tiles)
        return turns, -(-tiles // turns)

    def sum_tile(self, x: Tensor) -> tuple[int, int]:
        """Return the positions and channels of a tile where positions are summed up."""
        channels = _divisor(x.shape[1], self.sum_channels)
        return min(self.positions, self.sum_size // channels), channels

    def splits(self, x: Tensor) -> int:
        """Return into how many parts positions are split for sums."""
        rows, channels = self.sum_tile(x)
        return max(1, min(self.sum_programs // -(-x.shape[1] // channels), x.numel() // x.shape[1] // rows))

    @property
    def launching(self) -> dict[str, int]:
        """What every launch is told."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def _divisor(extent: int, largest: int) -> int:
    """Return the largest power of two that divides ``extent``, from 16 up to ``largest``."""
    return min(largest, max(16, extent & -extent))


TILES = Tiles()


def positions_of_part(x: Tensor) -> int:
    """Return of how many positions a part of statistics is."""
    return TILES.tile(x)[0]


def _fits(x: Tensor, positions: int, channels: int) -> bool:
    """Return whether tiles of this size cover the tensor exactly."""
    return x.numel() // x.shape[1] % positions == 0 and x.shape[1] % channels == 0


def forward_launches(
    x: Tensor,  # (batch, channels, height, width), channels-last
    known: tuple[Tensor, int],  # parts of the statistics of x, and of how many positions each is
    parameters: Sequence[Tensor],  # gamma, beta, U, V
    epsilon: float,
    residual: Tensor | None,
    results: Sequence[Tensor],  # written: y, its parts, the thin tensor, packed factors, statistics, coefficients
) -> list[Launch]:
    """Normalize, activate and convolve x, and add the residual."""
    from benchmarks import fused_kernels as kernels
    from factorized.formats.thin_kernels import pack_kernel

    gamma, beta, U, V = parameters
    y, parts, thin, packed, statistics, coefficients = results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: len(U)], packed[len(U) :]
    spread = thin.new_empty((positions, 3 * R))
    packing = (U.contiguous(), V.contiguous(), packed, len(U), len(packed), U.shape[1], R)
    norm = (known[0], gamma, beta, statistics, coefficients, len(known[0]), positions, known[1], epsilon)
    (bm, bc), (em, en), launching = TILES.tile(x), TILES.tile(y), TILES.launching
    sizes = {"H": height, "W": width, "O": channels, "R": R, "RESIDUAL": residual is not None, "BM": em, "BN": en}
    turns, shares = TILES.turns_of(y)
    sizes |= {"BY_PRODUCTS": TILES.sums_by_products, "EVEN": _fits(y, em, en * turns), "TURNS": turns}
    added = y if residual is None else residual
    return [
        Launch(pack_kernel, -(-packed.numel() // AT_ONCE), packing, {"SIZE": AT_ONCE}),
        Launch(kernels.statistics_kernel, -(-channels // 8), norm, {"C": channels, "BP": 256, "BC": 8}),
        Launch(
            kernels.project_kernel,
            -(-positions // bm),
            (x, coefficients, own_V, spread, positions),
            {"C": channels, "R": R, "EVEN": _fits(x, bm, bc), "BM": bm, "BC": bc, **launching},
        ),
        Launch(
            kernels.expand_kernel,
            len(parts) * shares,
            (spread, own_U, added, thin, y, parts, positions),
            {**sizes, **launching},
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
    from benchmarks import fused_gradients as kernels

    thin, packed, statistics, coefficients = kept
    x_gradient, of_U, of_V, of_norm = results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: 3 * channels], packed[3 * channels :]
    thin_gradient, back = torch.empty_like(thin), statistics.new_empty((3, channels))
    parts = statistics.new_empty((len(of_V), 2, channels))
    (bm, bc), (im, ic), (gm, gc), launching = TILES.tile(gradient), TILES.tile(x), TILES.sum_tile(x), TILES.launching
    span, summing = -(-positions // (len(of_U) * gm)) * gm, len(of_U) * -(-channels // gc)
    added, (turns, shares) = x_gradient if residual is None else residual, TILES.turns_of(x)
    return [
        Launch(
            kernels.thin_gradients_kernel,
            summing - (-positions // bm),
            (gradient, thin, own_U, thin_gradient, of_U, positions, span, summing),
            {"H": height, "W": width, "O": channels, "R": R, "BM": bm, "BC": bc, "GM": gm, "GC": gc, **launching},
        ),
        Launch(
            kernels.norm_sums_kernel,
            summing,
            (x, coefficients, statistics, own_V, thin_gradient, of_V, parts, positions, span, epsilon),
            {"W": width, "C": channels, "R": R, "EVEN": _fits(x, gm, gc), "GM": gm, "GC": gc, **launching},
        ),
        Launch(
            kernels.norm_coefficients_kernel,
            -(-channels // 8),
            (parts, statistics, coefficients, of_norm, back, len(parts), positions, epsilon),
            {"C": channels, "BP": 128, "BC": 8},
        ),
        Launch(
            kernels.input_gradient_kernel,
            -(-positions // im) * shares,
            (x, coefficients, back, own_V, thin_gradient, added, x_gradient, positions),
            {
                **{"W": width, "C": channels, "R": R, "RESIDUAL": residual is not None, "BM": im, "BC": ic},
                **{"EVEN": _fits(x, im, ic * turns), "TURNS": turns},
                **launching,
            },
        ),
    ]
