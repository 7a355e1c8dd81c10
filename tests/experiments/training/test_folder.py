from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from factorized.experiments.training import state as state_module
from factorized.experiments.training.folder import claimed, prepare_folders
from factorized.experiments.training.interrupt import CannotWrite, Interrupted
from factorized.experiments.training.state import FILE, RunState, load_state, save_state
from factorized.experiments.training.step import TrainingStep
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import load_trained
from tests.experiments.training.small import Signals, assert_same_run, digits, recipe, state_of
from tests.models.unchanged import files

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is trained."""

    def step(self: TrainingStep) -> None:
        raise AssertionError("a step was taken")

    monkeypatch.setattr(TrainingStep, "__call__", step)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let every longer write fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.usefixtures("no_step")
def test_a_folder_that_cannot_be_made_fails_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ValueError, match=r"cannot write to .*taken/seed-0: Not a directory; choose another folder"):
        train(recipe(), digits(), tmp_path / "taken", device="cpu")


@contextmanager
def without_privileges() -> Iterator[None]:
    """Be somebody whom the permissions of files bind: root may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "seed-0").mkdir(mode=0o500)
    with ExitStack() as claims, without_privileges(), pytest.raises(ValueError, match="seed-0: Permission denied"):
        prepare_folders([tmp_path / "seed-0"], 0, claims, resume=False, overwrite=False)


@pytest.mark.usefixtures("no_step")
def test_a_refused_probe_fails_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(ValueError, match="seed-0: Permission denied; choose another folder with --out"):
        train(recipe(), digits(), tmp_path, device="cpu")


@pytest.mark.usefixtures("no_step")
def test_every_seed_s_folder_is_checked_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "seed-2").write_text("a file")
    with pytest.raises(ValueError, match=r"cannot write to .*seed-2"):
        train(recipe(), digits(), tmp_path, seeds=(0, 1, 2), device="cpu")


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize(("seeds", "free"), [((0,), 100_000), ((0, 1, 2), 300_000)])
def test_a_full_disk_fails_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: tuple[int, ...], free: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - free, free))
    with pytest.raises(ValueError, match=rf"MiB free, and {len(seeds)} run\(s\) need .* MiB; make room"):
        train(recipe(), digits(), tmp_path, seeds=seeds, device="cpu")


def test_the_bytes_a_run_is_said_to_need_cover_those_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or Usage(10**9, 0, 10**9))
    train(recipe("decay.record_norms=true"), digits(), tmp_path, device="cpu")
    run = tmp_path / "seed-0"
    model = sum(path.stat().st_size for path in (run / "model").iterdir())
    written = 2 * (run / FILE).stat().st_size + model + (run / "norms.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, written))
    with pytest.raises(ValueError, match="MiB free"):
        train(recipe("decay.record_norms=true"), digits(), tmp_path, device="cpu", overwrite=True)
    assert asked == [run]
    assert (run / "result.json").is_file()  # nothing is removed where nothing can be written


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize("left", ["checkpoint.pt", "result.json"])
def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path, left: str) -> None:
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / left).write_text("earlier")
    with pytest.raises(
        ValueError, match=r"seed-1 already holds a run .*; continue it with --resume, or start over with"
    ):
        train(recipe(), digits(), tmp_path, seeds=(0, 1), device="cpu")
    assert (tmp_path / "seed-1" / left).read_text() == "earlier"


def test_overwriting_removes_what_the_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    dense = recipe(name="digits/resnet8")
    train(dense, digits(), tmp_path, device="cpu")
    (tmp_path / "seed-0" / "notes.txt").write_text("mine")
    before = {path.name for path in (tmp_path / "seed-0").iterdir()}
    for made in ("composed.onnx", "lowered.safetensors"):
        (tmp_path / "seed-0" / made).write_text("of the earlier network")
    train(recipe(), digits(), tmp_path, device="cpu", overwrite=True)
    train(recipe(), digits(), tmp_path / "fresh", device="cpu")
    assert_same_run(tmp_path, tmp_path / "fresh")
    after = {path.name for path in (tmp_path / "seed-0").iterdir()}
    assert len(after) == len(before)
    assert "notes.txt" in after
    _, _, network = load_trained(tmp_path / "seed-0")  # of the new run, not the dense one before it
    assert network.state_dict().keys() == state_of(tmp_path).network.keys()


def test_a_write_that_fails_in_the_middle_of_a_run_is_a_readable_error(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(recipe(), digits(), tmp_path, device="cpu", reporter=Signals(signal.SIGTERM, epoch=0, step=None))
    before = (tmp_path / "seed-0" / FILE).read_bytes()
    with (
        pytest.raises(ValueError, match=r"cannot write to .*seed-0: File too large; make room"),
        files_of_at_most(20_000),
    ):
        train(recipe(), digits(), tmp_path, device="cpu", resume=True)
    assert (tmp_path / "seed-0" / FILE).read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))
    train(recipe(), digits(), tmp_path, device="cpu", resume=True)
    train(recipe(), digits(), tmp_path / "whole", device="cpu")
    assert_same_run(tmp_path, tmp_path / "whole")


@pytest.mark.parametrize("name", ["save_trained", "write_json", "write_norms"])
def test_a_result_that_cannot_be_written_is_a_readable_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"factorized.experiments.training.trainer.{name}", fail)
    with pytest.raises(CannotWrite, match=r"cannot write to .*seed-0: No space left on device; make room$"):
        train(recipe("schedule.epochs=1", "decay.record_norms=true"), digits(), tmp_path, device="cpu")
    assert not (tmp_path / "seed-0" / "result.json").exists()


def small_state(epoch: int) -> RunState:
    return RunState(recipe={"run": {"batch": 2}}, seed=0, data="0", epoch=epoch)


@pytest.mark.parametrize(("target", "name"), [(os, "fsync"), (Path, "replace"), (state_module.torch, "save")])
def test_a_checkpoint_is_the_old_one_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Any, name: str
) -> None:
    save_state(small_state(1), tmp_path)
    before = files(tmp_path)

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(target, name, fail)
        with pytest.raises(OSError, match="No space left"):
            save_state(small_state(2), tmp_path)
    assert files(tmp_path) == before
    assert load_state(tmp_path).epoch == 1
    save_state(small_state(2), tmp_path)
    assert load_state(tmp_path).epoch == 2
    assert list(files(tmp_path)) == list(before)


def test_a_probe_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with files_of_at_most(100), pytest.raises(ValueError, match="choose another folder with --out"):
        train(recipe(), digits(), tmp_path, device="cpu")
    assert files(tmp_path / "seed-0") == {}


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize("how", [{}, {"resume": "auto"}, {"overwrite": True}])
def test_two_processes_do_not_train_into_one_folder(tmp_path: Path, how: dict[str, Any]) -> None:
    (tmp_path / "seed-1").mkdir()
    code = "import sys; from pathlib import Path; from factorized.experiments.training.folder import claimed\n"
    code += "with claimed(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "seed-1")],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(ValueError, match=r"another process is training into .*seed-1; let it end"):
            train(recipe(), digits(), tmp_path, seeds=(0, 1), device="cpu", **how)
        other.kill()  # and the claim of a process that is killed ends with it
    with claimed(tmp_path / "seed-0"), claimed(tmp_path / "seed-1"):
        pass


@pytest.mark.parametrize("finished", [False, True])
def test_resuming_removes_what_an_interrupted_save_left_in_the_network_s_folder(tmp_path: Path, finished: bool) -> None:
    train(recipe(), digits(), tmp_path, device="cpu")
    run = tmp_path / "seed-0"
    kept = {path.name for path in (run / "model").iterdir()}
    (run / "model" / "plan.json.123.tmp").write_text("half")
    if not finished:
        (run / "result.json").unlink()
        (run / "model" / "weights-000000000000.safetensors").write_text("of a save that was killed")
    train(recipe(), digits(), tmp_path, device="cpu", resume=True)
    left = {path.name for path in (run / "model").iterdir()}
    assert len(left) == len(kept)
    assert "plan.json.123.tmp" not in left
    assert "weights-000000000000.safetensors" not in left
    load_trained(run)


def test_what_is_free_and_what_is_needed_never_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 2**20 + 1))
    with ExitStack() as claims, pytest.raises(ValueError, match=r"has 1 MiB free, and 1 run\(s\) need 2 MiB"):
        prepare_folders([tmp_path], 2**20 + 2, claims, resume=False, overwrite=False)


def test_what_a_run_left_that_never_saved_anything_does_not_get_into_the_next(tmp_path: Path) -> None:
    run = tmp_path / "seed-0"
    run.mkdir()
    for name in ("events.out.tfevents.1.host.2.0", "checkpoint.pt.123.tmp", "metrics.jsonl"):
        (run / name).write_text("of a run that was killed")
    train(recipe(), digits(), tmp_path, device="cpu")
    assert not (run / "events.out.tfevents.1.host.2.0").exists()
    assert list(run.glob("*.tmp")) == []
