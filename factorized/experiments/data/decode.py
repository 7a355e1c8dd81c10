"""Decode image files of one size into one tensor of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from factorized.experiments.data.extras import need
from factorized.experiments.data.progress import Progress

Pixels = npt.NDArray[np.uint8]  # (height, width) or (height, width, 3)
GRAY = {"1", "L", "LA", "La"}
COLOUR = {"P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV"}
REPORT_EVERY = 500


def to_pixels(image: Any, where: str) -> Pixels:
    """Return the pixels of a Pillow image, gray or RGB, rotated as its metadata says; raise if that would lose data."""
    if image.mode not in GRAY | COLOUR:
        raise ValueError(
            f"{where} has mode {image.mode}, more than 8 bits for a channel; expected gray or colour of 8 bits. "
            "Convert it first"
        )
    try:
        upright = need("PIL.ImageOps", "pillow", "reading image files").exif_transpose(image)
        if "transparency" in upright.info:  # drop it, as from images of other modes
            upright = upright.convert("LA" if upright.mode in GRAY else "RGBA")
        return np.array(upright.convert("L" if image.mode in GRAY else "RGB"))
    except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for damaged files, by format
        raise ValueError(f"{where} is damaged or truncated: {error}") from error


def as_many_channels(
    x_train: Tensor,  # (n, channels, height, width)
    x_test: Tensor,  # (m, channels, height, width)
) -> tuple[Tensor, Tensor]:
    """Return both sets with three channels where one is gray and the other in colour."""
    if x_train.shape[1] == x_test.shape[1]:
        return x_train, x_test
    return x_train.expand(-1, 3, -1, -1).contiguous(), x_test.expand(-1, 3, -1, -1).contiguous()


def stack_pixels(
    images: Iterable[tuple[str, Pixels]],  # where it is from, for messages
    count: int,
    stage: str,
    progress: Progress,
) -> Tensor:  # (count, channels, height, width) uint8
    """Return ``count`` images as one tensor; gray ones among colour ones get three equal channels."""
    stack: Tensor | None = None
    first = ""
    done = 0
    for where, pixels in images:
        size = pixels.shape[:2]
        channels_first = torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1)
        if stack is None:
            first = where
            stack = torch.empty((count, *channels_first.shape), dtype=torch.uint8)
        if tuple(stack.shape[2:]) != size:
            height, width = stack.shape[2:]
            raise ValueError(
                f"{where} is {size[0]}×{size[1]}, but {first} is {height}×{width}; all images of a set must have one "
                "size. Resize them first"
            )
        if len(channels_first) > stack.shape[1]:  # the first colour image among gray ones
            stack = stack.expand(-1, 3, -1, -1).contiguous()
        stack[done] = channels_first
        done += 1
        if done % REPORT_EVERY == 0:
            progress(stage, done, count)
    if stack is None or done != count:
        raise ValueError(f"{stage}: expected {count:,} images, got {done:,}")
    progress(stage, done, count)
    return stack
