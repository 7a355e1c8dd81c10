"""The files of a run: ``metrics.jsonl``, TensorBoard curves and ``result.json``."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from factorized.decay.forms import forms
from factorized.diagnostics.diagnose import Diagnosis, diagnose
from factorized.diagnostics.summary import summary
from factorized.experiments.data.images import Images
from factorized.experiments.training.folder import METRICS, writing
from factorized.experiments.training.threads import one_thread
from factorized.files.atomic import write_text
from factorized.files.checksum import sealed
from factorized.version import PACKAGE, __version__

Row = dict[str, Any]
NORMS = ("frobenius", "spectral", "nuclear", "nuclear_bound", "stable_rank")  # of a product that a result holds


class Recorder:
    """While entered, writes rows to TensorBoard and to a file that is whole after every row.

    A row belongs to an epoch, or to what ``by`` says. ``folder=None`` writes nothing, for a process that is not the
    first.
    """

    def __init__(self, folder: Path | None, history: Sequence[Row], by: str = "epoch") -> None:
        self.folder, self.history, self.by = folder, history, by

    def __enter__(self) -> Self:
        if self.folder is None:
            return self
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        # A run that was killed may have written a row after its last checkpoint: begin with what that one knows.
        with writing(self.folder):
            write_text(self.folder / METRICS, "".join(map(_line, self.history)))
            _wait_for_another_second(self.folder)
            self.board = SummaryWriter(
                str(self.folder), purge_step=self.history[-1][self.by] + 1 if self.history else 1
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self.folder is not None:
            self.board.close()

    def add(self, row: Row) -> None:
        """Write a row."""
        if self.folder is None:
            return
        with writing(self.folder):
            with (self.folder / METRICS).open("a") as file:
                file.write(_line(row))
            for name, value in row.items():
                if name != self.by:
                    self.board.add_scalar(name, value, row[self.by])
            self.board.flush()


def _wait_for_another_second(folder: Path) -> None:
    """Wait until no file of TensorBoard is from this second: it reads them in the order of the seconds they name."""
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    left = max(seconds, default=0) + 1 - time.time()
    if left > 0:
        time.sleep(min(left, 1.0))


def product_row(network: nn.Module, lr: float) -> Row:
    """Return the averages over all products of what figures 1 and 3 show; nothing for a network without products."""
    if not forms(network):
        return {}
    rows = _norms(deepcopy(network).cpu(), lr)
    bounds = [row.nuclear_bound for row in rows if row.nuclear_bound is not None]  # tensors and deep products have none
    return {
        "nuclear": sum(row.nuclear or 0.0 for row in rows) / len(rows),
        **({"nuclear_bound": sum(bounds) / len(bounds)} if bounds else {}),
        "frobenius": sum(row.frobenius for row in rows) / len(rows),
        "effective_step": sum(row.effective_step for row in rows) / len(rows),
    }


def layer_rows(network: nn.Module) -> list[Row]:
    """Return rank, size and norms of every product of a trained network; an empty list for one without products."""
    if not forms(network):
        return []
    network = deepcopy(network).cpu()
    sizes, rows = {row.name: row for row in summary(network).rows}, []
    for form, norms in zip(forms(network), _norms(network, 0.0), strict=True):
        if (size := sizes.get(form.name)) is not None:
            own: Row = {"format": size.format, "shape": list(size.shape), "rank": size.rank}
            own |= {"params": size.params, "dense_params": size.dense_params}
        else:  # a form of attention, whose factors are weights of several layers
            left, right = form.values[0], form.values[-1]
            own = {"format": "product", "shape": [*left.shape[:-1], right.shape[-2]], "rank": str(left.shape[-1])}
            own |= {"params": left.numel() + right.numel(), "dense_params": None}
        rows.append({"name": form.name, "kind": form.kind, **own, **{name: getattr(norms, name) for name in NORMS}})
    return rows


def _norms(network: nn.Module, lr: float) -> list[Diagnosis]:
    """Return the norms of products on a CPU: singular values of small matrices take an H200 longer."""
    with one_thread():
        return diagnose(network, lr)


def describe_machine(device: torch.device) -> Row:
    """Return the hardware and versions to write beside a result."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "python": platform.python_version(),
        "factorized": __version__,
        "commit": commit(),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")  # more detailed than what Python reports
    lines = path.read_text().splitlines() if path.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def describe_data(images: Images) -> Row:
    """Return the part of a result that describes the images: enough to build the network again and to feed it."""
    return {
        "name": images.name,
        "checksum": images.checksum,
        "classes": list(images.classes),
        "channels": images.channels,
        "size": list(images.size),
        "mean": list(images.mean),
        "std": list(images.std),
    }


def commit() -> str | None:
    """Return the commit of the package's own checkout, with -dirty where files differ; None where it is not in one."""
    root = PACKAGE.resolve().parent
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:  # installed inside another repository
        return None
    return _git(root, "describe", "--match=", "--always", "--abbrev=40", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def write_json(path: Path, data: Row) -> None:
    """Write ``data`` with its checksum, atomically."""
    write_text(path, json.dumps(sealed(_plain(data)), indent=1, allow_nan=False) + "\n")


def _line(row: Row) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(data: Any) -> Any:
    """Return ``data`` with null for NaN and infinity, such as the step size of a product that is zero."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
