"""Passes that a CUDA graph replays: what they compute, and when there are any."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.text import captured
from factorized.experiments.text.language import LanguageTask
from factorized.experiments.text.task import TextTask
from factorized.experiments.text.train import TASKS, train_text
from factorized.experiments.text.trained import load_text_run
from tests.experiments.text.small import small

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def capture_without_gpu(step: Any) -> Callable[[], object]:
    """Do as ``capture`` does: warm up, and write the results of every replay to the tensors of the captured pass."""
    for _ in range(4):
        step()
    parameters = step.__self__._parameters
    captured_gradients = [parameter.grad for parameter in parameters]

    def replay() -> None:
        step()
        for parameter, gradient in zip(parameters, captured_gradients, strict=True):
            gradient.copy_(parameter.grad)

    return replay


@pytest.mark.parametrize("task", ["language", "masked"])
def test_a_replayed_pass_trains_as_an_ordinary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    changes = ("model.dropout=0.1", "factorize.scheme=low_rank", "factorize.rank=4", "decay.kind=frobenius")
    recipe, corpus = small(task, tmp_path, *changes)
    passes: list[Any] = []

    def noted(step: Callable[[], object]) -> Callable[[], object]:
        passes.append(step)
        return capture_without_gpu(step)

    monkeypatch.setattr(captured, "capture", noted)
    (plain,) = train_text(recipe, corpus, tmp_path / "plain", device="cpu")
    assert not passes
    monkeypatch.setattr(TextTask, "is_captured", lambda *_: True)
    (replayed,) = train_text(recipe, corpus, tmp_path / "replayed", device="cpu")
    assert len(passes) == 1
    assert replayed["scores"] == plain["scores"]
    models = [load_text_run(tmp_path / name / "seed-0")[2].state_dict() for name in ("plain", "replayed")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize(
    ("task", "changes", "device", "processes", "expected"),
    [
        ("language", (), CUDA, 1, True),
        ("masked", (), CUDA, 1, True),
        ("translation", (), CUDA, 1, False),  # batches of many shapes
        ("language", ("run.graph=no",), CUDA, 1, False),
        ("language", ("run.compile=false",), CUDA, 1, False),
        ("language", ("run.accumulate=2",), CUDA, 1, False),
        ("language", (), CUDA, 2, False),
        ("language", (), CPU, 1, False),
    ],
)
def test_a_pass_is_captured_where_batches_are_whole_and_of_one_shape(
    tmp_path: Path, task: str, changes: tuple[str, ...], device: torch.device, processes: int, expected: bool
) -> None:
    recipe, corpus = small(task, tmp_path, "run.compile=true", *changes)
    assert TASKS[task](recipe, corpus).is_captured(device, processes) is expected


def test_the_memory_of_a_graph_is_freed_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[weakref.ref[Any]] = []

    def noted(step: Any) -> Callable[[], object]:
        replay = capture_without_gpu(step)
        graphs.append(weakref.ref(replay))
        return replay

    monkeypatch.setattr(captured, "capture", noted)
    monkeypatch.setattr(TextTask, "is_captured", lambda *_: True)
    recipe, corpus = small("language", tmp_path)
    freed = []
    monkeypatch.setattr(LanguageTask, "test", lambda *_: freed.append(graphs[0]() is None) or {})
    train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert freed == [True]
