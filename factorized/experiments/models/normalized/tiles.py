"""Tile sizes of the kernels that normalize: the positions and channels of each program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


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
    stream_size: int = 4096  # of a tile where numbers are only read, added up and written
    stream_warps: int = 8
    cover_size: int = 4096  # of one that is a program's only one
    cover_warps: int = 4

    def tile(self, x: Tensor) -> tuple[int, int]:
        """Return the positions and channels of a tile where channels are summed up."""
        rows, positions = self.positions, x.numel() // x.shape[1]
        while rows // 2 >= max(16, x.shape[3]) and positions < rows * self.programs:
            rows //= 2
        return rows, _divisor(x.shape[1], self.channels)

    def walk(self, x: Tensor, R: int = 0) -> Walk:
        """Return how programs walk through the positions of a tensor.

        With R, each of them also writes its part of a factor's gradient. Where all parts would take more bytes than the
        tensor, walks are longer, and through half of the channels where programs would be too few.
        """
        positions, channels = x.numel() // x.shape[1], self.walk_channels
        if self.walks_fit or x.shape[1] < channels:
            channels = _divisor(x.shape[1], channels)
        tiles = -(-x.shape[1] // channels)
        splits = self.walk_programs // tiles
        if R and positions // (6 * R) < splits:  # a part has 12 R bytes for each channel, a position 2
            splits = positions // (6 * R)
            if splits * tiles < self.walk_programs // 2 and channels > 16:
                channels //= 2
        return Walk.of(x, min(self.positions, self.walk_size // channels), channels, splits)

    def stream(self, x: Tensor) -> Walk:
        """Return how programs walk where numbers are only read and added up."""
        channels = _divisor(x.shape[1], self.walk_channels)
        return Walk.of(x, self.stream_size // channels, channels, self.walk_programs * channels // x.shape[1])

    def cover(self, x: Tensor) -> Walk:
        """Return programs that have one tile each."""
        channels = _divisor(x.shape[1], self.walk_channels)
        rows = self.cover_size // channels
        return Walk(rows, channels, rows, -(-(x.numel() // x.shape[1]) // rows), -(-x.shape[1] // channels))

    @property
    def launching(self) -> dict[str, int]:
        """Launch options of kernels that multiply."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    @property
    def walking(self) -> dict[str, int]:
        """Launch options of kernels that walk through positions."""
        return {"AHEAD": self.ahead, **self.launching}


class Walk(NamedTuple):
    """Programs that each walk through a span of positions, for some channels, one tile after another."""

    positions: int  # of a tile
    channels: int
    span: int
    splits: int  # spans
    tiles: int  # of channels

    @classmethod
    def of(cls, x: Tensor, rows: int, channels: int, splits: int) -> Walk:
        """Return walks by ``rows`` positions, no more than ``splits`` times the tiles of channels."""
        positions = x.numel() // x.shape[1]
        span = -(-positions // (max(1, min(splits, positions // rows)) * rows)) * rows
        return cls(rows, channels, span, -(-positions // span), -(-x.shape[1] // channels))

    @property
    def programs(self) -> int:
        """The number of programs."""
        return self.splits * self.tiles

    def sizes(self, x: Tensor) -> dict[str, Any]:
        """Return the arguments of a launch that describe its tiles."""
        even = x.numel() // x.shape[1] % self.positions == 0 and x.shape[1] % self.channels == 0
        return {"C": x.shape[1], "EVEN": even, "GM": self.positions, "GC": self.channels}


def _divisor(extent: int, largest: int) -> int:
    """Return the largest power of two that divides ``extent``, from 16 up to ``largest``."""
    return min(largest, max(16, extent & -extent))


TILES = Tiles()
