"""Batches of data that do not fit on the device, in an order that depends on seed and epoch only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

WORKERS_PER_CORE = 4  # more processes only wait for each other
Batch = tuple[Tensor, Tensor]  # (n, channels, height, width) uint8, (n,) int64


class TensorSource:
    """Labelled images in memory or in a mapped file, by their numbers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if len(x) != len(y):
            raise ValueError(f"x and y must be of one length, got {len(x):,} images and {len(y):,} labels")
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Sequence[int]) -> Batch:
        which = torch.as_tensor(index)
        return self.x[which], self.y[which]


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:  # (count,) int64
    """Return a shuffle of 0..count-1 that depends on the seed and the epoch, and on nothing that was drawn before."""
    mixed = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
    return torch.randperm(count, generator=generator)


class EpochSampler(Sampler[list[int]]):
    """The numbers of the images of each batch of one epoch, for one of ``world`` processes."""

    def __init__(
        self, count: int, batch: int, seed: int, *, shuffle: bool, drop_last: bool, rank: int, world: int
    ) -> None:
        self.count, self.batch, self.seed, self.shuffle, self.drop_last = count, batch, seed, shuffle, drop_last
        self.rank, self.world = rank, world
        self.epoch = 0
        self.first = 0  # batch of the epoch that is read

    def order(self) -> list[int]:
        """Return this process's images of the epoch, in order.

        Shuffled ones are as many for every process, a few of them twice if need be, so that none waits for another at
        the end; ordered ones are each there once, so that an accuracy is of the whole set.
        """
        if not self.shuffle:
            return list(range(self.rank, self.count, self.world))
        order = epoch_order(self.count, self.seed, self.epoch)
        each = -(-self.count // self.world)
        padded = torch.arange(each * self.world) % self.count
        return order[padded][self.rank :: self.world].tolist()

    def __len__(self) -> int:
        each = -(-self.count // self.world) if self.shuffle else len(range(self.rank, self.count, self.world))
        return each // self.batch if self.drop_last else -(-each // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        return (order[self.batch * i : self.batch * (i + 1)] for i in range(self.first, len(self)))


class ImageLoader:
    """Batches of bytes and labels on ``device``, an epoch at a time; ``augment`` then does there what it always does.

    ``workers`` processes read ahead; none are needed for a source in memory. Epoch n is the same whether or not the
    epochs before it were run, with any number of workers: a run goes on from any epoch.
    """

    def __init__(
        self,
        source: TensorSource,
        batch: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        for argument, value, least in (("batch", batch, 1), ("workers", workers, 0), ("world", world, 1)):
            if value < least:
                raise ValueError(f"{argument} must be a whole number of at least {least}, got {value!r}")
        if workers > (most := WORKERS_PER_CORE * (os.cpu_count() or 1)):
            raise ValueError(f"workers must be at most {most}, {WORKERS_PER_CORE} for each core, got {workers:,}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in 0..{world - 1}, got {rank}")
        self.device = torch.device(device)
        self._sampler = EpochSampler(
            len(source), batch, seed, shuffle=shuffle, drop_last=drop_last, rank=rank, world=world
        )
        if not len(self._sampler):
            raise ValueError(f"batch={batch} is more than the {len(source):,} images there are; drop_last leaves none")
        self._loader: DataLoader[Batch] = DataLoader(
            source,  # type: ignore[arg-type]  # indexed by a whole batch, which its type does not foresee
            batch_size=None,
            sampler=self._sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # of its own: else each epoch would draw from the training's random state
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def epoch(
        self, epoch: int, *, seed: int | None = None, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:  # (n, channels, height, width) uint8, (n,) int64
        """Yield the batches of an epoch from the ``first``; ``seed`` replaces the loader's, from now on."""
        self._sampler.epoch, self._sampler.first = epoch, first
        self._sampler.seed = self._sampler.seed if seed is None else seed
        for x, y in self._loader:
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
