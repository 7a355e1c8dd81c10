"""One safe file for a data set: safetensors, mapped into memory, with a checksum of all that it holds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from factorized.experiments.data.explain import writing_to
from factorized.experiments.data.images import Images, byte_chunks
from factorized.experiments.data.progress import Progress, silent
from factorized.files.atomic import write_whole
from factorized.files.checksum import bytes_needed, file_header, in_file_order

FORMAT = "factorized images 1"
SUFFIX = ".safetensors"
TENSORS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Prepared:
    """The header of a prepared file, or what is wrong with it."""

    name: str
    path: Path
    train: int = 0  # images
    test: int = 0
    classes: int = 0
    shape: tuple[int, ...] = ()  # channels, height, width
    checksum: str = ""
    source: str = ""
    problem: str = ""  # why it cannot be used; empty for a good file


def write_prepared(images: Images, path: Path, progress: Progress = silent) -> None:
    """Write ``images`` to ``path`` atomically, without a second copy of them in memory."""
    info = {
        "name": images.name,
        "classes": images.classes,
        "mean": images.mean,
        "std": images.std,
        "source": images.source,
        "checksum": images.checksum,
    }
    text = json.dumps(info)
    tensors = in_file_order({key: getattr(images, key) for key in TENSORS})
    header = file_header(tensors, {"format": FORMAT, "info": text, "info_checksum": _digest(text)})
    size = bytes_needed(tensors)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(header)
            done = 0
            for chunk in (chunk for tensor in tensors.values() for chunk in byte_chunks(tensor)):
                file.write(chunk)
                done += len(chunk)
                progress("writing", done, size)

    with writing_to(path, f"make room for {len(header) + size:,} bytes, or choose another data folder"):
        write_whole(path, write)


def read_prepared(path: Path) -> Images:
    """Return the images of a prepared file, mapped into memory, after reading them once to check their checksum."""
    info, _ = _read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            x_train, y_train, x_test, y_test = (file.get_tensor(key) for key in TENSORS)
    except SafetensorError as error:
        raise _damaged(path, error) from error
    classes, mean, std = (tuple(info[key]) for key in ("classes", "mean", "std"))
    try:
        images = Images(info["name"], x_train, y_train, x_test, y_test, classes, mean, std, info["source"])
    except ValueError as error:  # labels that no class has, say
        raise _damaged(path, error) from error
    if images.checksum != info["checksum"]:
        raise _damaged(path, f"its checksum is {images.checksum}, expected {info['checksum']}")
    return images


def describe_prepared(path: Path) -> Prepared:
    """Return what the header of a prepared file says; the images are not read."""
    try:
        info, shapes = _read_header(path)
    except ValueError as error:
        return Prepared(path.stem, path, problem=str(error))
    (train, *shape), (test, *_) = shapes["x_train"], shapes["x_test"]
    return Prepared(
        info["name"], path, train, test, len(info["classes"]), tuple(shape), info["checksum"], info["source"]
    )


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; `factorized data prepare` writes it")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            keys = set(file.keys())
            shapes = {key: file.get_slice(key).get_shape() for key in keys & set(TENSORS)}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    if metadata.get("format") != FORMAT or keys != set(TENSORS):
        raise ValueError(
            f"{path} is not a data set of this version: expected {FORMAT!r} with {', '.join(TENSORS)}, got "
            f"{metadata.get('format')!r} with {', '.join(sorted(keys)[:4])}; prepare it again"
        )
    if _digest(metadata.get("info", "")) != metadata.get("info_checksum"):
        raise _damaged(path, "the checksum of its description does not match")
    info: dict[str, Any] = json.loads(metadata["info"])
    return info, shapes


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(f"{path} is damaged ({reason}; {path.stat().st_size:,} bytes): prepare it again")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
