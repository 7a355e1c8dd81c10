"""Saves that are killed, run beside each other, or cannot write."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.files import folder as checkpoint_folder
from factorized.files.atomic import WholeFile, write_whole
from factorized.files.checksum import save_tensors
from tests.files.saver import dense, filled
from tests.models.unchanged import files

ROOT = Path(__file__).parents[2]


@contextmanager
def saver(folder: Path, *flush: str) -> Iterator[subprocess.Popen[str]]:
    """Let another process save into ``folder`` again and again; it is killed in the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tests/files/saver.py", str(folder), *flush]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_save_of(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"


def values(folder: Path) -> list[float]:
    return torch.cat([p.detach().flatten() for p in fz.load(folder, dense()).parameters()]).unique().tolist()


@pytest.mark.parametrize(("flush", "left"), [("1", 2), ("2", 2)])
def test_what_a_killed_save_left_is_removed_by_the_next_one(tmp_path: Path, flush: str, left: int) -> None:
    fz.save(filled(1.0), tmp_path)
    with saver(tmp_path, flush) as process:
        assert process.wait() == -signal.SIGKILL
    assert len(files(tmp_path)) == 2 + left
    assert values(tmp_path) == [1.0]
    fz.save(filled(2.0), tmp_path)
    assert len(files(tmp_path)) == 2
    assert values(tmp_path) == [2.0]


@pytest.mark.nightly
def test_thirty_kills_at_any_moment_leave_a_checkpoint_and_nothing_else_after_the_next_save(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(30):
        with saver(tmp_path) as process:
            first_save_of(process)
            time.sleep(chance.random() / 20)
        assert len(values(tmp_path)) == 1
        assert len(files(tmp_path)) <= 6
    fz.save(filled(7.0), tmp_path)
    assert len(files(tmp_path)) == 2
    assert values(tmp_path) == [7.0]


def test_files_that_another_save_is_writing_are_kept(tmp_path: Path) -> None:
    with WholeFile(tmp_path / "weights-0123456789ab.safetensors") as other, WholeFile(tmp_path / "plan.json") as plan:
        fz.save(filled(1.0), tmp_path)
        assert other.temporary.exists()
        assert plan.temporary.exists()
        other.put()
        fz.save(filled(2.0), tmp_path)
        assert other.path.exists()  # in place, but plan.json does not name it yet
    fz.save(filled(3.0), tmp_path)
    assert len(files(tmp_path)) == 2


def test_weights_are_kept_while_plan_json_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fz.save(filled(1.0), tmp_path)
    (tmp_path / "plan.json").write_text("{")
    monkeypatch.setattr(checkpoint_folder, "write_tensors", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        fz.save(filled(2.0), tmp_path)
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    "name",
    [
        "notes.tmp",
        "weights-best.safetensors",
        "weights-0123456789AB.safetensors",
        "weights-0123456789ab.safetensors.tmp",
        "weights-0123456789ab.safetensors.bak",
        "plan.json.12.tmp",
        "model.safetensors.0123456789ab.tmp",
    ],
)
def test_files_of_the_user_are_never_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / "weights-000000000000.safetensors").mkdir()
    for value in (1.0, 2.0):
        fz.save(filled(value), tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 4


def test_a_model_can_be_loaded_at_any_moment_while_another_process_saves(tmp_path: Path) -> None:
    fresh = dense()
    with saver(tmp_path) as process:
        first_save_of(process)
        found = []
        for _ in range(200):
            loaded = fz.load(tmp_path, nn.Sequential(*fresh))
            found.append(torch.cat([p.detach().flatten() for p in loaded.parameters()]).unique().tolist())
        assert process.poll() is None
    assert all(len(values) == 1 for values in found)
    assert found == sorted(found)
    assert found[-1] > found[0]


def test_two_processes_may_save_into_one_folder(tmp_path: Path) -> None:
    with saver(tmp_path) as first, saver(tmp_path) as second:
        first_save_of(first)
        first_save_of(second)
        for value in range(50):
            fz.save(filled(float(value)), tmp_path)
            assert len(values(tmp_path)) == 1
        assert first.poll() is None
        assert second.poll() is None
    fz.save(filled(7.0), tmp_path)
    assert values(tmp_path) == [7.0]
    assert len(files(tmp_path)) == 2


def test_weights_named_by_plan_json_that_stay_away_are_called_missing(tmp_path: Path) -> None:
    fz.save(filled(1.0), tmp_path)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"weights-.*\.safetensors is missing, but plan\.json names it"):
        fz.load(tmp_path, dense())


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_all_files_obey_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        fz.save(filled(1.0), tmp_path)
        save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)})
        write_whole(tmp_path / "b.txt", lambda path: path.write_text("b"))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~umask}
    assert len(files(tmp_path)) == 4


def failing(number: int) -> Any:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("target", [(checkpoint_folder, "write_tensors"), (os, "fsync"), (Path, "mkdir")])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_folder_and_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: tuple[Any, str], number: int
) -> None:
    model = filled(1.0)
    monkeypatch.setattr(*target, failing(number))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 8000, 1000))
    message = rf"could not be saved: {os.strerror(number)} \([0-9,]+ bytes are needed and 1,000 are free; make room"
    with pytest.raises(OSError, match=message) as caught:
        fz.save(model, tmp_path / "out")
    assert caught.value.errno == number
    assert caught.value.filename == str(tmp_path / "out")
    assert not (tmp_path / "out").exists() or files(tmp_path / "out") == {}


@pytest.mark.parametrize("place", ["file", "file/out"])
def test_a_place_that_cannot_be_a_folder_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    message = rf"could not be saved: .* \(save into a folder that can be written\): '{tmp_path / place}'"
    with pytest.raises(OSError, match=message):
        fz.save(filled(1.0), tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_where_nothing_may_be_written_is_named() -> None:
    with pytest.raises(
        OSError, match=r"could not be saved: .* \(save into a folder that can be written\): '/proc/out'"
    ):
        fz.save(filled(1.0), "/proc/out")
