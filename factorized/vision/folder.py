"""The folders of runs: made, checked and cleared before anything is trained; and what a failed write says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from factorized.vision import norms, state, trained

METRICS = "metrics.jsonl"
_LEFT = (state.FILE, METRICS, trained.RESULT, norms.FILE)


def prepare_folders(folders: Sequence[Path], needed: int, *, resume: bool, overwrite: bool) -> None:
    """Make the folders of all runs, and fail now rather than at a checkpoint if one cannot be written.

    ``needed`` is the bytes that a run writes. With ``overwrite`` what an earlier run left is removed, once every folder
    has proved to be fit.
    """
    for folder in folders:
        _probe(folder)
        left = [name for name in (state.FILE, trained.RESULT) if (folder / name).exists()]
        if left and not (resume or overwrite):
            raise ValueError(
                f"{folder} already holds a run ({left[0]}); go on with --resume, or start anew with --overwrite"
            )
    free = shutil.disk_usage(folders[0]).free
    if free < needed * len(folders):
        raise ValueError(
            f"{folders[0]} has {free / 2**20:,.0f} MiB free, and {len(folders)} run(s) need "
            f"{needed * len(folders) / 2**20:,.0f} MiB; make room, or choose another folder with --out"
        )
    if overwrite and not resume:
        for folder in folders:
            _clear(folder)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a write that fails into a readable error."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ValueError(
            f"cannot write to {folder}: {reason}; the checkpoint before it is kept. Make room, then go on with --resume"
        ) from error


def _probe(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / "probe.tmp"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None


def _clear(folder: Path) -> None:
    for path in (*(folder / name for name in _LEFT), *folder.glob("events.out.tfevents.*")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / trained.FOLDER, ignore_errors=True)
