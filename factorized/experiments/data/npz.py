"""Images in a NumPy archive: x_train, y_train, x_test, y_test, and optionally the names of the classes."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from factorized.experiments.data.images import Images, numbered_classes
from factorized.experiments.data.known import make_images
from factorized.experiments.data.progress import Progress, silent

KEYS = ("x_train", "y_train", "x_test", "y_test")
CHANNELS = (1, 3)
DEFLATE = 1032  # bytes that one compressed byte can stand for, at most
UNREADABLE = (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
Array = npt.NDArray[Any]


def load_npz(path: Path, progress: Progress = silent) -> Images:
    """Return the images of an ``.npz`` file; nothing in it is unpickled."""
    arrays = _read(path, progress)
    parts = []
    for part in ("train", "test"):
        x = _channels_first(path, f"x_{part}", arrays[f"x_{part}"])
        parts.append((x, _labels(path, f"y_{part}", arrays[f"y_{part}"])))
    classes = _classes(path, arrays["classes"]) if "classes" in arrays else None
    classes = classes or numbered_classes(str(path), parts[0][1], parts[1][1])
    return make_images(path.stem, parts[0], parts[1], classes, str(path))


def _read(path: Path, progress: Progress) -> dict[str, Array]:
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is not an .npz file with {', '.join(KEYS)}, or truncated ({path.stat().st_size:,} bytes)"
        )
    with np.load(path, allow_pickle=False) as archive:
        missing = [key for key in KEYS if key not in archive.files]
        if missing:
            raise ValueError(
                f"{path} must hold {', '.join(KEYS)}; it has no {', '.join(missing)}, it holds "
                f"{', '.join(archive.files) or 'nothing'}"
            )
        arrays = {}
        keys = [key for key in (*KEYS, "classes") if key in archive.files]
        for done, key in enumerate(keys, start=1):
            _check_size(path, archive.zip, key)
            arrays[key] = _member(path, archive, key)
            progress("reading", done, len(keys))
        return arrays


def _check_size(path: Path, archive: zipfile.ZipFile, key: str) -> None:
    """Raise for an array that says it is larger than the bytes at hand, before NumPy makes room for it."""
    try:
        info = archive.getinfo(f"{key}.npy")
        with archive.open(info) as file:
            version = np.lib.format.read_magic(file)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read_header[version](file)
    except (*UNREADABLE, KeyError) as error:
        raise _unreadable(path, key, error) from error
    needed = math.prod(shape) * dtype.itemsize
    there = min(info.file_size, DEFLATE * info.compress_size)
    if needed > there:
        raise ValueError(
            f"{path}: {key} is {dtype} {shape}, {needed:,} bytes, and the file holds at most {there:,} of them; it is "
            "damaged: write it again"
        )


def _member(path: Path, archive: Any, key: str) -> Array:
    try:
        return np.asarray(archive[key])
    except MemoryError as error:
        raise ValueError(
            f"{path}: {key} does not fit into memory: {error}; an image folder is read in pieces"
        ) from error
    except UNREADABLE as error:
        raise _unreadable(path, key, error) from error


def _unreadable(path: Path, key: str, error: Exception) -> ValueError:
    return ValueError(f"{path}: {key} cannot be read, expected an array of numbers: {error}")


def _channels_first(path: Path, key: str, x: Array) -> Tensor:  # (n, channels, height, width)
    if x.dtype != np.uint8:
        raise ValueError(
            f"{path}: {key} must be uint8, got {x.dtype} {x.shape}; pixels in 0..1 become bytes by "
            "(x * 255).round().astype('uint8')"
        )
    if x.ndim == 3:
        return torch.from_numpy(x)[:, None]
    first, last = (x.ndim == 4 and x.shape[axis] in CHANNELS for axis in (1, 3))
    if first == last:
        raise ValueError(
            f"{path}: {key} must be (n, height, width, channels), (n, channels, height, width) or (n, height, width) "
            f"with 1 or 3 channels, got {x.shape}" + ("; which axis is meant is not clear" if first else "")
        )
    return torch.from_numpy(x) if first else torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()


def _labels(path: Path, key: str, y: Array) -> Tensor:  # (n,)
    if y.dtype.kind not in "iu" or y.ndim not in (1, 2) or (y.ndim == 2 and y.shape[1] != 1):
        raise ValueError(f"{path}: {key} must be whole numbers (n,), got {y.dtype} {y.shape}")
    return torch.from_numpy(y.reshape(-1).clip(max=np.iinfo(np.int64).max).astype(np.int64))


def _classes(path: Path, names: Array) -> tuple[str, ...]:
    if names.dtype.kind != "U" or names.ndim != 1:
        raise ValueError(f"{path}: classes must be a list of names, got {names.dtype} {names.shape}")
    return tuple(str(name) for name in names)
