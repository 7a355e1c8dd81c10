"""A small network without kinks, whose float32 runs stay near float64 ones; and without statistics of a batch."""

from __future__ import annotations

from torch import nn

NAME = "tests.experiments.training.smooth:smooth_network"
WITH_DROPOUT = "tests.experiments.training.smooth:network_with_dropout"


def network_with_dropout(classes: int, channels: int) -> nn.Module:
    """Return the network below with dropout before its linear layer."""
    network = smooth_network(classes, channels)
    return nn.Sequential(*network[:-1], nn.Dropout(0.2), network[-1])


def smooth_network(classes: int, channels: int) -> nn.Sequential:
    """Return four convolutions with group normalization, pooling and a linear layer."""
    return nn.Sequential(
        *_block(channels, 16, 1),
        *_block(16, 24, 2),
        *_block(24, 24, 1),
        *_block(24, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


def _block(incoming: int, outgoing: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(incoming, outgoing, 3, stride, padding=1, bias=False), nn.GroupNorm(4, outgoing), nn.SiLU()
