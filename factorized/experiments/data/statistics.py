"""Mean and standard deviation of the channels of many images, exact and without a float copy of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CHUNK = 2048  # images
LEVELS = torch.arange(256, dtype=torch.int64)


def channel_statistics(
    chunks: Iterable[Tensor],  # each (n, channels, height, width) uint8
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of pixels in 0..1.

    Counts how often each of the 256 levels occurs: sums of whole numbers do not depend on order or pieces. A
    channel of one colour has standard deviation 1, so that it can be divided by.
    """
    counts: Tensor | None = None
    for chunk in chunks:
        channels = chunk.shape[1]
        found = torch.stack([torch.bincount(chunk[:, c].flatten(), minlength=256) for c in range(channels)]).cpu()
        counts = found if counts is None else counts + found
    if counts is None:
        raise ValueError("channel statistics need at least one image, got none")
    means, stds = [], []
    for row in counts:
        n = int(row.sum())
        total, squares = int((row * LEVELS).sum()), int((row * LEVELS**2).sum())
        means.append(total / n / 255)
        variance = squares * n - total**2  # times n²: whole numbers, nothing cancels
        stds.append(math.sqrt(variance) / n / 255 or 1.0)
    return tuple(means), tuple(stds)


def in_chunks(
    x: Tensor,  # (n, ...)
) -> Iterator[Tensor]:
    """Yield ``x`` a few images at a time."""
    return (x[start : start + CHUNK] for start in range(0, len(x), CHUNK))
