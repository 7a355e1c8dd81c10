"""Sources of training batches."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from factorized.experiments.data.images import Images
from factorized.experiments.training.processes import Processes

Batch = tuple[Tensor, Tensor, Tensor]  # images (m, c, h, w) uint8, which of them (batch,), their labels (batch,)


class Source(Protocol):
    """Batches of one epoch after another, each epoch in its own order."""

    steps: int  # in an epoch; what does not fill a batch waits for another epoch's order

    def start(self, seed: int, epoch: int, step: int = 0) -> None:
        """Begin an epoch, at a step of it: the order depends on nothing but these numbers."""

    def feed(self) -> None:
        """Make the next batch ready; called before every step, outside its graph."""

    def take(self) -> Batch:
        """Return the batch, by work on the device alone."""


class OnDevice:
    """The whole training set on the device as uint8; a batch is a choice of rows, made inside the step."""

    def __init__(self, images: Images, batch: int, processes: Processes) -> None:
        check_batch(len(images.y_train), batch, processes.count)
        device = processes.device
        self.batch, self.steps = batch, len(images.y_train) // batch
        self.x = images.x_train.to(device).contiguous(memory_format=torch.channels_last)
        self.y = images.y_train.to(device)
        self.order = torch.zeros(len(self.y), dtype=torch.int64, device=device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.offsets = torch.arange(processes.rank, batch, processes.count, device=device)

    def start(self, seed: int, epoch: int, step: int = 0) -> None:
        """Shuffle for an epoch."""
        self.order.copy_(epoch_order(len(self.y), seed, epoch))
        self.cursor.fill_(step * self.batch)

    def feed(self) -> None:
        """Do nothing: the data are on the device."""

    def take(self) -> Batch:
        """Return the set, the rows of this batch and their labels."""
        index = self.order[self.cursor + self.offsets]
        self.cursor += self.batch
        self.cursor %= self.steps * self.batch  # a capture warms up past the end of a short epoch
        return self.x, index, self.y[index]


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:  # (count,) int64
    """Return a shuffle of 0..count-1 that depends on the seed and the epoch, and on nothing that was drawn before."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(_mixed(f"{seed} {epoch}")))


def draws_seed(seed: int, epoch: int, process: int | None = None) -> int:
    """Return the number that an epoch's draws start from, or those of one process that others do not share.

    The order has another, so that they are independent.
    """
    return _mixed(f"{seed} {epoch} draws" + ("" if process is None else f" {process}"))


def _mixed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def check_batch(count: int, batch: int, processes: int) -> None:
    """Refuse a batch that the data or the processes cannot fill."""
    if batch > count:
        raise ValueError(f"run.batch = {batch} is more than the {count} training images; make it smaller")
    if batch % processes:
        raise ValueError(
            f"run.batch = {batch} cannot be shared by {processes} processes; make it a multiple of {processes}"
        )
