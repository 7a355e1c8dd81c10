"""Folders of runs: making, checking, claiming and clearing them before training; errors of failed writes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from factorized.experiments.data.explain import in_words, writing_to
from factorized.experiments.training import norms, state, trained
from factorized.experiments.training.export import COMPOSED, LOWERED, SUFFIXES
from factorized.experiments.training.interrupt import CannotWrite
from factorized.experiments.training.result import RESULT
from factorized.files.atomic import locked_folder

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"  # of text: the folder that transformers' Trainer writes
BEGUN = "begun.json"  # of text: what the run trains
COMPRESSION = "compress.json"  # of a compressed network: what `factorized compress` has done
FAILURE = "failure.json"  # of a job whose run ended in an error: recipe, seed and error
_LEFT = (state.FILE, METRICS, RESULT, norms.FILE, BEGUN)
_MADE_FROM_IT = tuple(f"{stem}{suffix}" for stem in (COMPOSED, LOWERED) for suffix in SUFFIXES.values())


def prepare_folders(
    folders: Sequence[Path],
    needed: int,
    claims: ExitStack,
    *,
    resume: bool | Literal["auto"],
    overwrite: bool,
) -> None:
    """Claim the folders of all runs; raise before training if one cannot be written.

    ``needed`` is the bytes that a run writes. Unless it is resumed, what an earlier run left is removed, once every
    folder has passed its checks. ``resume=True`` needs a run to resume in one of them at least.
    """
    if resume is True and not any(_began(folder) for folder in folders):
        raise ValueError(_nothing_to_resume(folders))
    for folder in folders:
        _probe(folder)
        claims.enter_context(claimed(folder))
        left = _runs(folder)
        if left and not (resume or overwrite):
            raise ValueError(
                f"{folder} already holds a run ({left[0]}); continue it with --resume, or start over with --overwrite"
            )
    free = shutil.disk_usage(folders[0]).free
    if free < needed * len(folders):
        raise ValueError(
            f"{folders[0]} has {math.floor(free / 2**20):,} MiB free, and {len(folders)} run(s) need "
            f"{math.ceil(needed * len(folders) / 2**20):,} MiB; make room, or choose another folder with --out"
        )
    for folder in folders:
        for unfinished in (*folder.glob("*.tmp"), *(folder / trained.FOLDER).glob("*.tmp")):  # of a process killed
            unfinished.unlink()
        (folder / FAILURE).unlink(missing_ok=True)  # the run goes on, or starts over
        if not resume:
            _clear(folder)


def _runs(folder: Path) -> list[str]:
    return [name for name in (state.FILE, CHECKPOINTS, RESULT) if (folder / name).exists()]


def _began(folder: Path) -> bool:
    """Return whether there is a run to resume: one killed before its first checkpoint has only its metrics."""
    return bool(_runs(folder)) or (folder / METRICS).exists()


def _nothing_to_resume(folders: Sequence[Path]) -> str:
    """Return a message: where no run was found, and which folders with one are named alike."""
    wanted = folders[0]
    patterns = [(wanted.parent, "*")]  # other seeds; then another name in place of one of the folders above
    for depth in range(1, min(4, len(wanted.parts))):
        above, below = Path(*wanted.parts[: -depth - 1]), "/".join(wanted.parts[-depth:])
        patterns.append((above, f"*/{below}"))
    found = set()
    for above, pattern in patterns:
        with suppress(OSError):  # folders that may not be read
            found |= {path for path in above.glob(pattern) if _runs(path)}
    near = sorted(found, key=lambda path: -SequenceMatcher(None, str(path), str(wanted)).ratio())[:3]
    hint = f"; there are runs in {', '.join(map(str, near))}" if near else ""
    where = ", ".join(map(str, folders[:3]))
    return (
        f"there is nothing to resume in {where}{hint}. Name the right --out, start without --resume, or give "
        "--auto-resume to start where there is no run"
    )


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes from training into ``folder``; the claim of one that is killed ends with it."""
    with locked_folder(folder, wait=False) as is_mine:
        if is_mine is False:
            raise ValueError(f"another process is training into {folder}; let it end, or choose another with --out")
        yield


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a write that fails into a readable error."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CannotWrite(f"cannot write to {folder}: {in_words(error, named=False)}; make room") from error


def _probe(folder: Path) -> None:
    with writing_to(folder, "choose another folder with --out"):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / "probe.tmp"
        try:
            probe.write_bytes(b"x" * 4096)
        finally:
            with suppress(OSError):
                probe.unlink()


def _clear(folder: Path) -> None:
    for path in (*(folder / name for name in (*_LEFT, *_MADE_FROM_IT)), *folder.glob("events.out.tfevents.*")):
        path.unlink(missing_ok=True)
    for name in (trained.FOLDER, CHECKPOINTS):
        shutil.rmtree(folder / name, ignore_errors=True)
