"""Atomic file writes."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

try:
    import fcntl
except ModuleNotFoundError:  # on Windows, which has other locks
    fcntl = None  # type: ignore[assignment]  # checked before every use

_locked: set[int] = set()  # descriptors of folders
_TEMPORARY = re.compile(r"(?P<name>.+)\.[0-9a-f]{12}\.tmp")


class WholeFile:
    """A context manager with a temporary file beside ``path``; ``put`` renames it to ``path`` once it is written.

    The file has the mode that the umask gives new files. It is locked until the block ends, under either name, so that
    ``remove_abandoned`` can distinguish it from one whose process was killed.
    """

    file: IO[bytes]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")  # no two writers share one

    def __enter__(self) -> Self:
        while True:
            self.file = self.temporary.open("xb")
            lock(self.file, wait=True)
            if os.fstat(self.file.fileno()).st_nlink:
                return self
            self.file.close()  # removed as abandoned before it was locked

    def put(self) -> None:
        """Flush the file to the disk and rename it atomically to ``path``."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.replace(self.path)

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # a full disk fails again when the file is closed
            self.file.close()
        with suppress(OSError):
            self.temporary.unlink()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it atomically to ``path``."""
    with WholeFile(path) as new:
        write(new.temporary)
        new.put()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically, as UTF-8."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def remove_abandoned(folder: Path, is_ours: Callable[[str], bool], is_needed: Callable[[Path], bool]) -> None:
    """Remove the files that killed processes left in ``folder``: temporary ones, and others that nothing needs.

    ``is_ours`` decides by name which files may be removed, ``is_needed`` which are in use. A file that a running
    process is writing is locked, and is kept. On a system without locks everything is kept.
    """
    for path in folder.iterdir():
        temporary = _TEMPORARY.fullmatch(path.name)
        if not is_ours(temporary["name"] if temporary else path.name) or path.is_symlink() or not path.is_file():
            continue
        with suppress(OSError), path.open("rb") as file:
            # In this order: whoever held the lock has by now written the file that shows whether this one is needed.
            if lock(file, wait=False) and (temporary or not is_needed(path)):
                path.unlink()


@contextmanager
def locked_folder(folder: Path, *, wait: bool) -> Iterator[bool | None]:
    """Hold the lock of a folder; yield whether that worked, or None where there are no locks."""
    if os.name == "nt":  # Windows cannot open folders
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    _locked.add(descriptor)
    try:
        yield lock(descriptor, wait=wait)
    finally:
        if descriptor in _locked:
            _locked.remove(descriptor)
            os.close(descriptor)


def _close_in_child() -> None:
    """Close the locked folders in a forked process, such as one that reads data: it would keep them locked."""
    while _locked:
        os.close(_locked.pop())


if os.name != "nt":
    os.register_at_fork(after_in_child=_close_in_child)


def lock(file: IO[bytes] | int, *, wait: bool) -> bool | None:
    """Lock a file, or the folder of a descriptor; return whether that worked, or None where there are no locks.

    The lock ends when the file is closed, or its process is killed.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:  # held by another process
        return False
    except OSError:  # a file system without locks
        return None
    return True
