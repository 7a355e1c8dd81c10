"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in place: ``path`` is the old file or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two processes at once do not write into one
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):  # where nothing may be written, nothing is there to remove
            temporary.unlink()
