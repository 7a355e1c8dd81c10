"""Batches that travel to the device one by one, for a training set that does not fit there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from factorized.experiments.data.images import Images
from factorized.experiments.data.loader import ImageLoader, TensorSource
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.source import Batch, check_batch


class Streamed:
    """The training set in memory or a mapped file; each batch is copied to one fixed place, which the step reads.

    The order is that of ``OnDevice``, and so is everything that is computed.
    """

    def __init__(self, images: Images, batch: int, processes: Processes, workers: int = 0) -> None:
        check_batch(len(images.y_train), batch, processes.count)
        share = batch // processes.count
        self.steps = len(images.y_train) // batch
        self.loader = ImageLoader(
            TensorSource(images.x_train, images.y_train),
            share,
            drop_last=True,
            workers=workers,
            device=processes.device,
            rank=processes.rank,
            world=processes.count,
        )
        self.x = torch.zeros(share, *images.x_train.shape[1:], dtype=torch.uint8, device=processes.device)
        self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.y = torch.zeros(share, dtype=torch.int64, device=processes.device)
        self.all = torch.arange(share, device=processes.device)
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def start(self, seed: int, epoch: int, step: int = 0) -> None:
        """Begin reading an epoch."""
        self._batches = self.loader.epoch(epoch, seed=seed, first=step)

    def feed(self) -> None:
        """Copy the next batch to its place."""
        x, y = next(self._batches)
        self.x.copy_(x, non_blocking=True)
        self.y.copy_(y, non_blocking=True)

    def take(self) -> Batch:
        """Return the batch that was fed."""
        return self.x, self.all, self.y
