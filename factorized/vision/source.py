"""Where a training step finds its batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from factorized.vision.data.images import Images

Batch = tuple[Tensor, Tensor, Tensor]  # images (m, c, h, w) uint8, which of them (batch,), their labels (batch,)


class Source(Protocol):
    """Batches of one epoch after another, each epoch in an order of its own."""

    steps: int  # in an epoch; what does not fill a batch waits for another epoch's order

    def start(self, seed: int, epoch: int, step: int = 0) -> None:
        """Begin an epoch, at a step of it: the order depends on nothing but these numbers."""

    def feed(self) -> None:
        """Make the next batch ready; called before every step, outside its graph."""

    def take(self) -> Batch:
        """Return the batch, by work on the device alone."""


class OnDevice:
    """The whole training set on the device as uint8; a batch is a choice of rows, made inside the step."""

    def __init__(self, images: Images, batch: int, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        check_batch(len(images.y_train), batch, ranks)
        self.batch, self.steps = batch, len(images.y_train) // batch
        self.x = images.x_train.to(device).contiguous(memory_format=torch.channels_last)
        self.y = images.y_train.to(device)
        self.order = torch.zeros(len(self.y), dtype=torch.int64, device=device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        share = batch // ranks
        self.offsets = torch.arange(rank * share, (rank + 1) * share, device=device)

    def start(self, seed: int, epoch: int, step: int = 0) -> None:
        """Shuffle for an epoch."""
        self.order.copy_(shuffled(len(self.y), seed, epoch))
        self.cursor.fill_(step * self.batch)

    def feed(self) -> None:
        """Do nothing: everything is there."""

    def take(self) -> Batch:
        """Return the set, the rows of this batch and their labels."""
        index = self.order[self.cursor + self.offsets]
        self.cursor += self.batch
        return self.x, index, self.y[index]


def shuffled(count: int, seed: int, epoch: int) -> Tensor:  # (count,)
    """Return the order of an epoch, the same on every machine and after every restart."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the number that all randomness of an epoch starts from."""
    return (seed * 1_000_003 + epoch + 1) % 2**63


def check_batch(count: int, batch: int, ranks: int) -> None:
    """Refuse a batch that the data or the processes cannot fill."""
    if batch > count:
        raise ValueError(f"run.batch = {batch} is more than the {count} training images; make it smaller")
    if batch % ranks:
        raise ValueError(f"run.batch = {batch} cannot be shared by {ranks} processes; make it a multiple of {ranks}")
