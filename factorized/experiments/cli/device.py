"""The device that ``--device`` names."""

from __future__ import annotations

import os

import torch


def pick_device(name: str | None) -> torch.device:
    """Return the device of that name, or a GPU where there is one; under ``torchrun`` this process's own GPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name is None else name)
    except RuntimeError:
        device = torch.device("meta")  # as little use
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ValueError(f"--device must be cpu, cuda or cuda:NUMBER, got {name!r}")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= count:
        raise ValueError(f"--device {name or 'cuda'}: there is no GPU {index}; this machine has {count}")
    return torch.device("cuda", index)
