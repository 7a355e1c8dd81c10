"""The launches of thin convolutions: which tile each program of the kernels gets, and with which numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TAPS = 3
PACKED_AT_ONCE = 1024  # entries of both factors
MOST_POSITIONS = 128  # of a tile; fewer where there would be too few programs
SUMMED_AT_ONCE = 64  # positions, in sums for a factor's gradient
MOST_CHANNELS = 64  # of a tile
PROGRAMS = 132  # at least, where possible; not the GPU's number, so that sums have one order on all GPUs
SETTINGS = {"num_warps": 4, "num_stages": 3}


def launch_forward(
    x: Tensor,  # (batch, in, height, width), channels-last
    U: Tensor,  # (out·3, rank)
    V: Tensor,  # (in·3, rank)
    y: Tensor,  # (batch, out, height, width), channels-last, written
    thin: Tensor,  # (batch, at least the rank, height, width), channels-last, written
    packed: Tensor,  # (out·3 + in·3, at least the rank), written
    stride: Sequence[int],
    padding: Sequence[int],  # top, bottom, left, right
) -> None:
    """Pack both factors, convolve along the width into the thin tensor, and from there along the height."""
    from factorized.formats.thin_kernels import convolve_kernel, pack_kernel

    own_U, own_V = packed.split([len(U), len(V)])
    first = _Line(x, own_V, thin, stride[1], padding[2], to_thin=True, along_height=False)
    second = _Line(thin, own_U, y, stride[0], padding[0], to_thin=False, along_height=True)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        grid = (-(-packed.numel() // PACKED_AT_ONCE),)
        sizes = (len(U), len(packed), U.shape[1], packed.shape[1])
        pack_kernel[grid](U.contiguous(), V.contiguous(), packed, *sizes, SIZE=PACKED_AT_ONCE)
        for line in (first, second):
            convolve_kernel[(line.programs,)](*line.arguments, **line.constants, **SETTINGS)


def launch_backward(
    gradient: Tensor,  # of y
    x: Tensor,
    thin: Tensor,
    packed: Tensor,
    x_gradient: Tensor,  # written
    sums: Tensor,  # (splits, entries of U and V), written: parts of the factors' gradients
    rank: int,
    stride: Sequence[int],
    padding: Sequence[int],
) -> None:
    """Go back along the height and then along the width; each launch also sums up the gradient of a factor."""
    from factorized.formats.thin_kernels import gradients_kernel

    thin_gradient = torch.empty_like(thin)
    own_U, own_V = packed.split([gradient.shape[1] * TAPS, x.shape[1] * TAPS])
    lines = [
        _Line(gradient, own_U, thin_gradient, stride[0], padding[0], to_thin=True, along_height=True, transposed=True),
        _Line(
            thin_gradient, own_V, x_gradient, stride[1], padding[2], to_thin=False, along_height=False, transposed=True
        ),
    ]
    sides = [
        _Sum(gradient, thin, sums, rank, transposed=False),
        _Sum(x, thin_gradient, sums[:, len(own_U) * rank :], rank, transposed=True),
    ]
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        for line, side in zip(lines, sides, strict=True):
            grid = (line.programs + side.programs,)
            arguments = (*line.arguments, *side.arguments)
            gradients_kernel[grid](*arguments, **line.constants, **side.constants, **SETTINGS)


@dataclass(frozen=True)
class _Line:
    """One launch of a convolution along the height or the width."""

    x: Tensor
    weight: Tensor  # (wide channels·taps, thin channels)
    y: Tensor
    stride: int
    padding: int
    to_thin: bool  # the outputs are the thin channels; else the inputs are
    along_height: bool
    transposed: bool = False

    @property
    def positions(self) -> int:
        return self.y.numel() // self.y.shape[1]

    @property
    def programs(self) -> int:
        return self._count(*self.tile)

    @property
    def tile(self) -> tuple[int, int]:
        """Positions and outputs of one program."""
        outputs, positions = _span(self.y.shape[1]), MOST_POSITIONS
        while positions > 32 and self._count(positions, outputs) < PROGRAMS:
            positions //= 2
        return positions, outputs

    def _count(self, positions: int, outputs: int) -> int:
        return -(-self.positions // positions) * -(-self.y.shape[1] // outputs)

    @property
    def arguments(self) -> tuple[Any, ...]:
        by_tap = self.weight.shape[1]
        by_input, by_output = (TAPS * by_tap, 1) if self.to_thin else (1, TAPS * by_tap)
        return (
            *(self.x, self.weight, self.y),
            *(self.positions, *self.y.shape[2:], *self.x.shape[2:], self.x.shape[1], self.y.shape[1]),
            *(by_tap, by_input, by_output, self.stride, self.padding),
        )

    @property
    def constants(self) -> dict[str, Any]:
        positions, outputs = self.tile
        return {
            "ALONG_HEIGHT": self.along_height,
            "TRANSPOSED": self.transposed,
            "TAPS": TAPS,
            "BM": positions,
            "BN": outputs,
            "BC": _span(self.x.shape[1]),
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
    def programs(self) -> int:
        return len(self.sums) * _count_tiles(self.wide, self.rank)

    @property
    def arguments(self) -> tuple[Any, ...]:
        positions = self.wide.numel() // self.wide.shape[1]
        span = -(-positions // (len(self.sums) * SUMMED_AT_ONCE)) * SUMMED_AT_ONCE
        return (
            *(self.wide, self.thin, self.sums, self.programs, span),
            *(positions, *self.wide.shape[2:], *self.thin.shape[2:]),
            *(self.wide.shape[1], self.thin.shape[1], self.rank, self.sums.stride(0)),
        )

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "SEEN_TRANSPOSED": self.transposed,
            "GM": SUMMED_AT_ONCE,
            "GW": _span(self.wide.shape[1]),
            "GR": _span(self.rank),
        }


def count_splits(wide: Tensor, rank: int) -> int:
    """Return into how many parts the positions of ``wide`` are split for the sums of a factor's gradient."""
    positions = wide.numel() // wide.shape[1]
    return max(1, min(PROGRAMS // _count_tiles(wide, rank), positions // SUMMED_AT_ONCE))


def _count_tiles(wide: Tensor, rank: int) -> int:
    """Return into how many tiles a factor's gradient is cut."""
    channels = wide.shape[1]
    return -(-channels // _span(channels)) * -(-rank // _span(rank))


def _span(channels: int) -> int:
    """Return the channels of a tile: the smallest power of two that spans them, within 16..``MOST_CHANNELS``."""
    return min(MOST_CHANNELS, max(16, 1 << (channels - 1).bit_length()))
