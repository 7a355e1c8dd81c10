"""Ways to spoil a file of the folder, whatever it is."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.cases import Prepare
from tests.hostile.damage import damage


class Runs:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("was-run"),)


def rewritten(path: str, data: str | bytes) -> Prepare:
    return lambda folder: (folder / path).write_bytes(data.encode() if isinstance(data, str) else data)


def removed(path: str) -> Prepare:
    return lambda folder: (folder / path).unlink()


def made_a_folder(path: str) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / path).unlink()
        (folder / path).mkdir()

    return prepare


def damaged(path: str, seed: int) -> Prepare:
    return lambda folder: damage(next(folder.glob(path)), seed)


def truncated(path: str, share: float) -> Prepare:
    def prepare(folder: Path) -> None:
        data = (folder / path).read_bytes()
        (folder / path).write_bytes(data[: int(share * len(data))])

    return prepare


GARBAGE: dict[str, Callable[[str], Prepare]] = {
    "missing": removed,
    "empty": lambda path: rewritten(path, ""),
    "text": lambda path: rewritten(path, "hello"),
    "zeros": lambda path: rewritten(path, bytes(1000)),
    "a folder": made_a_folder,
    "a pickle": lambda path: rewritten(path, pickle.dumps({"x": 1})),
    "an enormous header": lambda path: rewritten(path, struct.pack("<Q", 2**62) + b"{}"),
    "a header of garbage": lambda path: rewritten(path, struct.pack("<Q", 8) + b"{'a': 1}"),
}
