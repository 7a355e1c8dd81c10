from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import factorized as fz
from factorized.files import folder
from tests.files.saver import dense, filled
from tests.models.unchanged import files


class Interruption(BaseException):
    """What stops a program from outside, like KeyboardInterrupt."""


def loaded_value(saved: Path) -> float:
    values = torch.cat([p.detach().flatten() for p in fz.load(saved, dense()).parameters()]).unique()
    assert len(values) == 1
    return values.item()


def stop_at(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, call: int, after: bool) -> None:
    """Let the given call of a function raise, before or after it has done its work."""
    original = getattr(target, name)
    calls = []

    def stopped(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == call and not after:
            raise Interruption(f"{name} {call}")
        result = original(*args, **kwargs)
        if len(calls) == call:
            raise Interruption(f"{name} {call}")
        return result

    monkeypatch.setattr(target, name, stopped)


STEPS = [
    (folder, "write_tensors", 1, False),
    (folder, "write_tensors", 1, True),
    (os, "fsync", 1, False),
    (Path, "replace", 1, False),
    (Path, "replace", 1, True),
    (os, "fsync", 2, False),
    (Path, "replace", 2, False),
]


@pytest.mark.parametrize(("target", "name", "call", "after"), STEPS)
def test_an_interrupted_save_keeps_the_old_checkpoint_and_leaves_nothing_else(
    tmp_path: Path, target: Any, name: str, call: int, after: bool
) -> None:
    fz.save(filled(1.0), tmp_path)
    before = files(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, target, name, call, after)
        with pytest.raises(Interruption, match=f"{name} {call}"):
            fz.save(filled(2.0), tmp_path)
    assert files(tmp_path) == before
    assert loaded_value(tmp_path) == 1.0


@pytest.mark.parametrize(("target", "name", "call", "after"), STEPS)
def test_an_interrupted_first_save_leaves_an_empty_folder(
    tmp_path: Path, target: Any, name: str, call: int, after: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, target, name, call, after)
        with pytest.raises(Interruption):
            fz.save(filled(2.0), tmp_path)
    assert files(tmp_path) == {}
    with pytest.raises(ValueError, match=r"holds no checkpoint: plan\.json is missing"):
        fz.load(tmp_path, dense())


def test_a_save_interrupted_after_the_last_rename_is_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fz.save(filled(1.0), tmp_path)
    stop_at(monkeypatch, Path, "replace", call=2, after=True)
    with pytest.raises(Interruption):
        fz.save(filled(2.0), tmp_path)
    assert len(files(tmp_path)) == 2
    assert loaded_value(tmp_path) == 2.0


def test_a_reader_finds_a_whole_checkpoint_at_every_moment_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fz.save(filled(1.0), tmp_path)
    seen = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(loaded_value(tmp_path))
            result = original(*args, **kwargs)
            seen.append(loaded_value(tmp_path))
            return result

        return call

    monkeypatch.setattr(os, "fsync", watched(os.fsync))
    monkeypatch.setattr(Path, "replace", watched(Path.replace))
    fz.save(filled(2.0), tmp_path)
    assert seen == [1.0] * 7 + [2.0]
    assert loaded_value(tmp_path) == 2.0


def test_files_are_written_under_temporary_names_next_to_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = []
    original = Path.replace

    def watched(source: Path, target: Path) -> Path:
        renamed.append((source.name, target.name, source.parent == target.parent == tmp_path))
        return original(source, target)

    monkeypatch.setattr(Path, "replace", watched)
    fz.save(filled(1.0), tmp_path)
    weights = json.loads((tmp_path / "plan.json").read_text())["weights"]
    assert [(target, beside) for _, target, beside in renamed] == [(weights, True), ("plan.json", True)]
    for source, target, _ in renamed:  # nobody else has this name: others may save at the same time
        assert re.fullmatch(rf"{re.escape(target)}\.[0-9a-f]{{12}}\.tmp", source)


def test_what_is_written_is_flushed_to_the_disk_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    flush, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: events.append("flush") or flush(number))
    monkeypatch.setattr(Path, "replace", lambda source, target: events.append("rename") or rename(source, target))
    fz.save(filled(1.0), tmp_path)
    assert events == ["flush", "rename"] * 2


def test_saving_again_replaces_the_checkpoint_and_removes_the_old_weights(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for value in (1.0, 2.0, 3.0):
        fz.save(filled(value), tmp_path)
        assert loaded_value(tmp_path) == value
    assert len(files(tmp_path)) == 3
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("named", ["../precious", "precious", "{}/precious", "weights-1/../../precious.safetensors"])
def test_a_manifest_that_names_another_file_does_not_get_it_removed(tmp_path: Path, named: str) -> None:
    out = tmp_path / "out"
    (out / "weights-1").mkdir(parents=True)
    for place in (tmp_path / "precious", out / "precious", tmp_path / "precious.safetensors"):
        place.write_text("mine")
    (out / "plan.json").write_text(json.dumps({"weights": named.format(tmp_path)}))
    fz.save(filled(1.0), out)
    for place in (tmp_path / "precious", out / "precious", tmp_path / "precious.safetensors"):
        assert place.read_text() == "mine"
