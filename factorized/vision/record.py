"""What a run leaves behind: ``metrics.jsonl``, TensorBoard curves and ``result.json``."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from factorized.decay.forms import forms
from factorized.diagnostics.diagnose import diagnose
from factorized.version import __version__

Row = dict[str, Any]


class Recorder:
    """Writes a row per epoch, to a file that is complete after every row and to TensorBoard."""

    def __init__(self, folder: Path, history: Sequence[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.path = folder / "metrics.jsonl"
        # A run that was killed may have written a row after its last checkpoint: begin with what that one knows.
        self.path.write_text("".join(json.dumps(row) + "\n" for row in history))
        self.board = SummaryWriter(str(folder), purge_step=len(history))

    def add(self, row: Row) -> None:
        """Write the row of an epoch."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if name != "epoch" and isinstance(value, (int, float)):
                self.board.add_scalar(name, value, row["epoch"])
        self.board.flush()

    def close(self) -> None:
        """Close the curves."""
        self.board.close()


def product_row(network: nn.Module, lr: float) -> Row:
    """Return the averages over all products of what figures 1 and 3 show; nothing for a network without products."""
    if not forms(network):
        return {}
    rows = diagnose(network, lr)
    bounds = [row.nuclear_bound for row in rows if row.nuclear_bound is not None]  # tensors have none
    return {
        "nuclear": sum(row.nuclear or 0.0 for row in rows) / len(rows),
        **({"nuclear_bound": sum(bounds) / len(bounds)} if bounds else {}),
        "frobenius": sum(row.frobenius for row in rows) / len(rows),
        "effective_step": sum(row.effective_step for row in rows) / len(rows),
    }


def describe_machine(device: torch.device) -> Row:
    """Return the hardware and versions to write beside a result."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "factorized": __version__,
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of the package's own checkout; None where it is not in one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def write_json(path: Path, data: Row) -> None:
    """Write ``data`` whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)
