"""Noise images of a data set's shape, for plans and for checking recipes."""

from __future__ import annotations

import torch

from factorized.experiments.data.images import Images
from factorized.experiments.data.known import KNOWN

DIGITS = (10, 8, 1)


def known_shape(name: str) -> tuple[int, int, int] | None:
    """Return classes, height (and width) and channels of a set known by name; None for any other."""
    if name == "digits":
        return DIGITS
    return (KNOWN[name].classes, KNOWN[name].size, 3) if name in KNOWN else None


def stand_in(name: str, classes: int, size: int, channels: int, count: int = 1) -> Images:
    """Return ``count`` images of noise for training and as many for the test, of ``size`` by ``size`` pixels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (2 * count, channels, size, size), dtype=torch.uint8, generator=generator, device="cpu")
    y = torch.randint(classes, (2 * count,), generator=generator, device="cpu")
    names = tuple(str(number) for number in range(classes))
    mean, std = (0.5,) * channels, (0.29,) * channels
    return Images(name, x[:count], y[:count], x[count:], y[count:], names, mean, std, f"noise of the shape of {name}")
