"""Where a verb computes: one device, or one of several processes that ``torchrun`` started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def pick_device(name: str | None) -> torch.device:
    """Return the device of that name, or a GPU where there is one; under ``torchrun`` this process's own GPU."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device must be cpu, cuda or cuda:NUMBER, got {name!r}") from None
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= count:
        raise ValueError(f"--device {name or 'cuda'}: this machine has {count} GPUs, and number {index} was asked for")
    return torch.device("cuda", index)


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the processes that ``torchrun`` started, over NCCL on GPUs and gloo on CPUs; alone, do nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
