"""The official CIFAR folders: pickles of Python 2, read without trusting them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from factorized.experiments.data.images import Images
from factorized.experiments.data.known import make_images
from factorized.experiments.data.progress import Progress
from factorized.experiments.data.unpickle import ByteArray, unpickle

SIDE = 32
LAYOUTS: dict[str, tuple[tuple[str, ...], str, str, str, str]] = {  # name: train, test, meta, labels, class names
    "cifar10": (tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta", "labels", "label_names"),
    "cifar100": (("train",), "test", "meta", "fine_labels", "fine_label_names"),
}


def cifar_layout(folder: Path) -> str | None:
    """Return which CIFAR ``folder`` looks like, or None."""
    for name, (train, test, meta, _, _) in LAYOUTS.items():
        there = [(folder / file).is_file() for file in (*train, test, meta)]
        if sum(there) > len(there) / 2:
            return name
    return None


def load_cifar_python(folder: Path, progress: Progress) -> Images:
    """Return CIFAR-10 or CIFAR-100 from the folder that its official archive unpacks to."""
    name = cifar_layout(folder)
    if name is None:
        expected = "; ".join(", ".join((*layout[0], layout[1], layout[2])) for layout in LAYOUTS.values())
        raise ValueError(f"{folder} is not a CIFAR folder: expected one of the sets of files {expected}")
    train, test, meta, labels, names = LAYOUTS[name]
    batches = []
    for done, file in enumerate((*train, test), start=1):
        batches.append(_read_batch(folder / file, labels))
        progress("reading", done, len(train) + 1)
    classes = tuple(_text(folder / meta, item) for item in _entry(folder / meta, _read(folder / meta), names, list))
    x = torch.cat([pixels for pixels, _ in batches[:-1]])
    y = torch.cat([label for _, label in batches[:-1]])
    return make_images(name, (x, y), batches[-1], classes, str(folder))


def _read_batch(path: Path, labels: str) -> tuple[Tensor, Tensor]:
    content = _read(path)
    data = _entry(path, content, "data", ByteArray).array
    if data.ndim != 2 or data.shape[1] != 3 * SIDE**2:
        raise ValueError(f"{path}: data must be (n, {3 * SIDE**2}), got {data.shape}")
    numbers = _entry(path, content, labels, list)
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{path}: {labels} must be a list of whole numbers")
    if len(numbers) != len(data):
        raise ValueError(f"{path}: {len(data):,} images and {len(numbers):,} {labels}; the file is damaged")
    x = torch.from_numpy(np.array(data, order="C")).view(-1, 3, SIDE, SIDE)
    return x, torch.tensor(numbers, dtype=torch.int64)


def _entry(path: Path, content: dict[Any, Any], key: str, kind: type) -> Any:
    value = content.get(key, content.get(key.encode()))  # Python 2 wrote bytes, Python 3 writes text
    if not isinstance(value, kind):
        raise ValueError(f"{path}: expected {key!r}, a {kind.__name__}, got {type(value).__name__}")
    return value


def _text(path: Path, name: object) -> str:
    if isinstance(name, bytes):
        return name.decode("utf-8", "replace")
    if not isinstance(name, str):
        raise ValueError(f"{path}: class names must be text, got {type(name).__name__}")
    return name


def _read(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; unpack the official archive again")
    content = unpickle(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a dictionary, got {type(content).__name__}")
    return content
