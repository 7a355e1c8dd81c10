"""One process, or several that ``torchrun`` started: which one is the first, and values that all of them share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from factorized._torch import leave_process_group
from factorized.experiments.training.interrupt import StopRequest

ASK = 20  # steps between two checks, across processes, for a stop request
Result = TypeVar("Result")
_groups = itertools.count()  # of processes, in the order in which every process joins them


@dataclass(frozen=True)
class Processes:
    """The processes that train together, as one of them sees them."""

    device: torch.device  # of this process
    rank: int = 0
    count: int = 1

    @property
    def kind(self) -> str:
        """The number and kind of devices: what a result depends on beyond its recipe and data."""
        return f"{self.count} {'process' if self.count == 1 else 'processes'} ({self.device.type})"

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes files."""
        return self.rank == 0

    def total(
        self,
        number: Tensor,  # ()
    ) -> float:
        """Return the sum of every process's ``number``; all of them have to ask."""
        if self.count > 1:
            number = number.clone()
            dist.all_reduce(number)
        return float(number.item())

    def of_each(
        self,
        tensor: Tensor,  # of the same shape in all of them
    ) -> list[Tensor]:
        """Return every process's ``tensor``, on the CPU; all of them have to ask."""
        own = tensor.to(self.device)
        found = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(found, own)
        return [one.cpu() for one in found]

    def asked_to_stop(self, stop: StopRequest, step: int) -> bool:
        """Return whether to stop now; several processes stop together, and ask each other every ``ASK`` steps."""
        asked = stop.number is not None
        if self.count == 1:
            return asked
        return step % ASK == 0 and self.total(torch.tensor(float(asked), device=self.device)) > 0

    def from_first(self, make: Callable[[], Result]) -> Result:
        """Call ``make`` in the first process; return its result, or raise its ValueError, in every process."""
        if self.count == 1:
            return make()
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told = [make(), None]
            except ValueError as error:
                told = [None, str(error)]
        dist.broadcast_object_list(told, device=self.device)
        result, problem = told
        if problem is not None:
            raise ValueError(problem)
        return result


@contextmanager
def joined_processes(device: torch.device | str | None = None) -> Iterator[Processes]:
    """Join the processes that ``torchrun`` started, each with its own GPU where there are any; or be the only one.

    A process group that is there already is used, and left as it was.
    """
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
    together = started or dist.is_initialized()
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if together else 0)
    device = torch.device(device or "cpu")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if not together:
        yield Processes(device)
        return
    mine = not dist.is_initialized()
    if mine:
        # A part of the launcher's store for each group: in what an earlier one left there, gloo would wait for ever.
        store, rank, count = next(rendezvous("env://"))
        store = PrefixStore(f"factorized {next(_groups)}", store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    try:
        yield Processes(device, dist.get_rank(), dist.get_world_size())
    finally:
        if mine:
            leave_process_group()
