"""Batches copied to the device one by one, for a training set that does not fit there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset

from factorized.experiments.data.images import Images
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.source import Batch, check_batch, epoch_order

WORKERS_PER_CORE = 4  # more processes only wait for each other


class EpochRows(Sampler[list[int]]):
    """The numbers of the images in each batch of an epoch: this process's share of them."""

    def __init__(self, count: int, batch: int, processes: Processes) -> None:
        self.count, self.batch, self.share = count, batch, slice(processes.rank, None, processes.count)
        self.seed = self.epoch = self.first = 0  # the batch to begin with

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.count, self.seed, self.epoch)
        batches = order[: self.count // self.batch * self.batch].split(self.batch)
        return (rows[self.share].tolist() for rows in batches[self.first :])


class Streamed:
    """The training set in memory or a mapped file; each batch is copied to one fixed place, which the step reads.

    The order is that of ``OnDevice``, and so is everything that is computed. ``workers`` processes read ahead; none are
    needed for images in memory.
    """

    def __init__(self, images: Images, batch: int, processes: Processes, workers: int = 0) -> None:
        check_batch(len(images.y_train), batch, processes.count)
        if workers > (most := WORKERS_PER_CORE * (os.cpu_count() or 1)):
            raise ValueError(f"data.workers must be at most {most}, {WORKERS_PER_CORE} for each core, got {workers:,}")
        share, self.device = batch // processes.count, processes.device
        self.steps = len(images.y_train) // batch
        self.rows = EpochRows(len(images.y_train), batch, processes)
        self.loader: DataLoader[list[Tensor]] = DataLoader(
            TensorDataset(images.x_train, images.y_train),  # type: ignore[arg-type]  # it returns a batch for its rows
            batch_size=None,
            sampler=self.rows,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # of its own: else each epoch would draw from the training's random state
        )
        self.x = torch.zeros(share, *images.x_train.shape[1:], dtype=torch.uint8, device=self.device)
        self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.y = torch.zeros(share, dtype=torch.int64, device=self.device)
        self.all = torch.arange(share, device=self.device)
        self._batches: Iterator[list[Tensor]] = iter(())

    def start(self, seed: int, epoch: int, step: int = 0) -> None:
        """Begin reading an epoch."""
        self.rows.seed, self.rows.epoch, self.rows.first = seed, epoch, step
        self._batches = iter(self.loader)

    def feed(self) -> None:
        """Copy the next batch to its place."""
        for place, part in zip((self.x, self.y), next(self._batches), strict=True):
            place.copy_(part.to(self.device, non_blocking=True))

    def take(self) -> Batch:
        """Return the batch that was fed."""
        return self.x, self.all, self.y
