"""Launches of the kernels of thin convolutions: the tile of each program, and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from factorized.formats.launches import Launch

TAPS = 3
PACKED_AT_ONCE = 1024


@dataclass(frozen=True)
class Tiles:
    """The sizes of a kernel program's tile, and how it is launched."""

    positions: int = 128
    outputs: int = 64
    inputs: int = 64
    sum_positions: int = 64  # at a time
    sum_wide: int = 64
    sum_thin: int = 64
    programs: int = 132  # at least, where possible; not the GPU's number, so that sums have one order on all GPUs
    warps: int = 4
    stages: int = 3


TILES = Tiles()


def forward_launches(
    x: Tensor,  # (batch, in, height, width), channels-last
    U: Tensor,  # (out·3, rank)
    V: Tensor,  # (in·3, rank)
    y: Tensor,  # (batch, out, height, width), channels-last, written
    thin: Tensor,  # (batch, at least the rank, height, width), channels-last, written
    packed: Tensor,  # (out·3 + in·3, at least the rank), written
    stride: Sequence[int],
    padding: Sequence[int],  # top, bottom, left, right
) -> list[Launch]:
    """Pack both factors, convolve along the width into the thin tensor, and from there along the height."""
    from factorized.formats.thin_kernels import convolve_kernel, pack_kernel

    own_U, own_V = packed.split([len(U), len(V)])
    first = _Line(x, own_V, thin, _by_thin(own_V), stride[1], padding[2], along_height=False)
    second = _Line(thin, own_U, y, _by_wide(own_U), stride[0], padding[0], along_height=True)
    sizes = (len(U), len(packed), U.shape[1], packed.shape[1])
    packing = (U.contiguous(), V.contiguous(), packed, *sizes)
    return [
        Launch(pack_kernel, -(-packed.numel() // PACKED_AT_ONCE), packing, {"SIZE": PACKED_AT_ONCE}),
        *(
            Launch(convolve_kernel, line.programs, line.arguments, {**line.constants, **_launching()})
            for line in (first, second)
        ),
    ]


def backward_launches(
    gradient: Tensor,  # of y
    x: Tensor,
    thin: Tensor,
    packed: Tensor,
    x_gradient: Tensor,  # written
    sums: Tensor,  # (splits, entries of U and V), written: parts of the factors' gradients
    rank: int,
    stride: Sequence[int],
    padding: Sequence[int],
) -> list[Launch]:
    """Go back along the height and then along the width; each launch also sums up the gradient of a factor."""
    from factorized.formats.thin_kernels import gradients_kernel

    thin_gradient = torch.empty_like(thin)
    own_U, own_V = packed.split([gradient.shape[1] * TAPS, x.shape[1] * TAPS])
    lines = [
        _Line(gradient, own_U, thin_gradient, _by_thin(own_U), stride[0], padding[0], True, transposed=True),
        _Line(thin_gradient, own_V, x_gradient, _by_wide(own_V), stride[1], padding[2], False, transposed=True),
    ]
    sides = [
        _Sum(gradient, thin, sums, rank, transposed=False),
        _Sum(x, thin_gradient, sums[:, len(own_U) * rank :], rank, transposed=True),
    ]
    return [
        Launch(
            gradients_kernel,
            line.programs + side.programs,
            (*line.arguments, *side.arguments),
            {**line.constants, **side.constants, **_launching()},
        )
        for line, side in zip(lines, sides, strict=True)
    ]


@dataclass(frozen=True)
class _Line:
    """One launch of a convolution along the height or the width."""

    x: Tensor
    weight: Tensor
    y: Tensor
    strides: tuple[int, int, int]  # of the weight, by tap, input and output
    stride: int
    padding: int
    along_height: bool
    transposed: bool = False

    @property
    def positions(self) -> int:
        return self.y.numel() // self.y.shape[1]

    @property
    def programs(self) -> int:
        constants = self.constants
        return -(-self.positions // constants["BM"]) * -(-self.y.shape[1] // constants["BN"])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            *(self.x, self.weight, self.y),
            *(self.positions, *self.y.shape[2:], *self.x.shape[2:], self.x.shape[1], self.y.shape[1]),
            *(*self.strides, self.stride, self.padding),
        )

    @property
    def constants(self) -> dict[str, Any]:
        outputs, positions = _power(self.y.shape[1], TILES.outputs), TILES.positions
        while positions > 32 and -(-self.positions // positions) * -(-self.y.shape[1] // outputs) < TILES.programs:
            positions //= 2
        return {
            "ALONG_HEIGHT": self.along_height,
            "TRANSPOSED": self.transposed,
            "TAPS": TAPS,
            "BM": positions,
            "BN": outputs,
            "BC": _power(self.x.shape[1], TILES.inputs),
        }


@dataclass(frozen=True)
class _Sum:
    """The part of a launch that computes a factor's gradient."""

    wide: Tensor
    thin: Tensor
    sums: Tensor  # (splits, at least the entries of the factor)
    rank: int
    transposed: bool

    @property
    def tiles(self) -> int:
        constants = self.constants
        return -(-self.wide.shape[1] // constants["GW"]) * -(-self.rank // constants["GR"])

    @property
    def programs(self) -> int:
        return len(self.sums) * self.tiles

    @property
    def arguments(self) -> tuple[Any, ...]:
        positions = self.wide.numel() // self.wide.shape[1]
        at_a_time = TILES.sum_positions
        span = -(-positions // (len(self.sums) * at_a_time)) * at_a_time
        return (
            *(
                self.wide,
                self.thin,
                self.sums,
                self.programs,
                span,
                positions,
                *self.wide.shape[2:],
                *self.thin.shape[2:],
            ),
            *(self.wide.shape[1], self.thin.shape[1], self.rank, self.sums.stride(0), self.rank, TAPS * self.rank),
        )

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "SEEN_TRANSPOSED": self.transposed,
            "GM": TILES.sum_positions,
            "GW": _power(self.wide.shape[1], TILES.sum_wide),
            "GR": _power(self.rank, TILES.sum_thin),
        }


def count_splits(wide: Tensor, rank: int) -> int:
    """Return into how many parts the positions of ``wide`` are split for the sums of a factor's gradient."""
    tiles = _Sum(wide, wide, wide, rank, transposed=False).tiles
    positions = wide.numel() // wide.shape[1]
    return max(1, min(TILES.programs // tiles, positions // TILES.sum_positions))


def _by_thin(factor: Tensor) -> tuple[int, int, int]:
    """Return the strides of a factor (wide·taps, rank) by tap, input and output if its outputs are thin."""
    rank = factor.shape[1]
    return rank, TAPS * rank, 1


def _by_wide(factor: Tensor) -> tuple[int, int, int]:
    """Return the strides of a factor (wide·taps, rank) by tap, input and output if its inputs are thin."""
    rank = factor.shape[1]
    return rank, 1, TAPS * rank


def _power(extent: int, largest: int) -> int:
    """Return the smallest power of two that spans ``extent``, from 16 up to ``largest``."""
    return min(largest, max(16, 1 << (extent - 1).bit_length()))


def _launching() -> dict[str, int]:
    return {"num_warps": TILES.warps, "num_stages": TILES.stages}
