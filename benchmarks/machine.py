"""What a figure was measured on."""

from __future__ import annotations

import platform

import torch


def describe_machine(device: str) -> dict[str, object]:
    """Return the hardware and versions to write beside a measurement."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
