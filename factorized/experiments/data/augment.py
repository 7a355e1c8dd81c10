"""Pad, crop, flip, normalize and cut out on the device: tensors in, tensors out, without synchronization.

The order is the paper's: black borders on the raw image, crop, flip, then normalization, then holes. Drawing and
applying are apart, so that a step may draw in eager mode and apply in a compiled graph, and give the same images as a
step that is all eager: the compiler draws other numbers than eager mode does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def normalize(
    x: Tensor,  # (n, channels, height, width) uint8
    mean: Sequence[float] | Tensor,  # (channels,)
    std: Sequence[float] | Tensor,  # (channels,)
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # (n, channels, height, width) dtype
    """Return (x / 255 - mean) / std, computed in float32."""
    return ((x.float() / 255 - _per_channel(mean, x)) / _per_channel(std, x)).to(dtype)


def draw_crops(
    count: int, pad: int, device: torch.device | str, flip: bool = True
) -> tuple[Tensor, Tensor, Tensor]:  # top (n,), left (n,), flipped (n,) bool
    """Draw an offset in 0..2·pad for rows and columns, and a flip with probability a half, for each image."""
    if pad < 0:
        raise ValueError(f"pad must be a number of pixels of at least 0, got {pad}")
    offsets = torch.randint(0, 2 * pad + 1, (2, count), device=device)
    flipped = torch.rand(count, device=device) < (0.5 if flip else 0.0)
    return offsets[0], offsets[1], flipped


def crop_flip(
    x: Tensor,  # (m, channels, height, width)
    top: Tensor,  # (n,) in 0..2·pad
    left: Tensor,  # (n,) in 0..2·pad
    flipped: Tensor,  # (n,) bool
    pad: int,
    index: Tensor | None = None,  # (n,) in 0..m-1
) -> Tensor:  # (n, channels, height, width)
    """Return each image cut out of itself in a black border of ``pad`` pixels, mirrored where ``flipped``.

    With ``index``, the images are ``x[index]``: choosing and cropping are then one gather.
    """
    count, (_, channels, height, width) = len(top), x.shape
    rows = torch.arange(height, device=x.device) + (top - pad)[:, None]  # (n, height), of the image without border
    columns = torch.arange(width, device=x.device).expand(count, width)
    columns = torch.where(flipped[:, None], width - 1 - columns, columns) + (left - pad)[:, None]  # (n, width)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    which = torch.arange(count, device=x.device) if index is None else index
    cropped = x[
        which[:, None, None, None],
        torch.arange(channels, device=x.device)[:, None, None],
        rows.clamp(0, height - 1)[:, None, :, None],
        columns.clamp(0, width - 1)[:, None, None, :],
    ]
    return cropped * inside[:, None]


def draw_holes(
    count: int, size: tuple[int, int], device: torch.device | str
) -> tuple[Tensor, Tensor]:  # row (n,), column (n,)
    """Draw the pixel in the middle of a hole for each image."""
    row, column = (torch.randint(0, extent, (count,), device=device) for extent in size)
    return row, column


def cut_out(
    x: Tensor,  # (n, channels, height, width), normalized
    row: Tensor,  # (n,) in 0..height-1
    column: Tensor,  # (n,) in 0..width-1
    side: int,
) -> Tensor:  # (n, channels, height, width)
    """Return the images with zeros in a square around a pixel, as far as it is inside the image (Cutout).

    See `DeVries and Taylor, 2017 <https://arxiv.org/abs/1708.04552>`_.
    """
    height, width = x.shape[2:]
    down = torch.arange(height, device=x.device) - (row - side // 2)[:, None]  # (n, height), from the square's corner
    right = torch.arange(width, device=x.device) - (column - side // 2)[:, None]  # (n, width)
    hole = ((down >= 0) & (down < side))[:, :, None] & ((right >= 0) & (right < side))[:, None, :]
    return x.masked_fill(hole[:, None], 0)


def _per_channel(values: Sequence[float] | Tensor, x: Tensor) -> Tensor:  # (channels, 1, 1)
    if isinstance(values, Tensor):
        return values.to(torch.float32)[:, None, None]
    # filled on the device: a copy from the host would wait for it, and cannot be captured in a CUDA graph
    return torch.stack([torch.full((1, 1), value, dtype=torch.float32, device=x.device) for value in values])
