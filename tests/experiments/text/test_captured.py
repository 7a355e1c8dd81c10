"""Passes that a CUDA graph replays: what they compute, and when there are any."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.text import captured
from factorized.experiments.text.captured import CapturedPasses
from factorized.experiments.text.language import LanguageTask
from factorized.experiments.text.task import Batch, TextTask
from factorized.experiments.text.train import TASKS, train_text
from factorized.experiments.text.trained import load_text_run
from tests.experiments.text.small import small, train_until, write_pairs_of_many_lengths

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def capture_without_gpu(step: Any, *_: Any) -> Callable[[], object]:
    """Do as ``capture`` does: warm up, and write the results of every replay to the tensors of the captured pass."""
    for _ in range(4):
        step()
    captured = {p: p.grad for p in step.__self__._parameters if p.grad is not None}
    loss = step.__self__._loss

    def replay() -> None:
        step()
        for parameter, gradient in captured.items():
            gradient.copy_(parameter.grad)
        step.__self__._loss = loss.copy_(step.__self__._loss)

    return replay


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Capture passes without a GPU, and note them."""
    found: list[Any] = []

    def noted(step: Any, *others: Any) -> Callable[[], object]:
        found.append(step.__self__)
        return capture_without_gpu(step, *others)

    monkeypatch.setattr(captured, "capture", noted)
    return found


@pytest.mark.parametrize("task", ["language", "masked"])
def test_a_replayed_pass_trains_as_an_ordinary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[Any], task: str
) -> None:
    changes = ("model.dropout=0.1", "factorize.scheme=low_rank", "factorize.rank=4", "decay.kind=frobenius")
    recipe, corpus = small(task, tmp_path, *changes)
    (plain,) = train_text(recipe, corpus, tmp_path / "plain", device="cpu")
    assert not passes
    monkeypatch.setattr(TextTask, "is_captured", lambda *_: True)
    (replayed,) = train_text(recipe, corpus, tmp_path / "replayed", device="cpu")
    assert len(passes) == 1
    assert replayed["scores"] == plain["scores"]
    assert_same_weights(tmp_path / "plain", tmp_path / "replayed")


def assert_same_weights(*runs: Path) -> None:
    one, other = (load_text_run(run / "seed-0")[2].state_dict() for run in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_translation_trains_by_a_graph_for_every_length_as_it_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[Any]
) -> None:
    write_pairs_of_many_lengths(tmp_path)
    changes = ("factorize.scheme=low_rank", "factorize.rank=4", "decay.kind=frobenius", "schedule.updates=20")
    recipe, corpus = small("translation", tmp_path, *changes, "run.label_smoothing=0.1", "run.tokens=100")
    (plain,) = train_text(recipe, corpus, tmp_path / "plain", device="cpu")
    monkeypatch.setattr(TextTask, "is_captured", lambda *_: True)
    (replayed,) = train_text(recipe, corpus, tmp_path / "replayed", device="cpu")
    lengths = [captured._batch["labels"].shape[1] for captured in passes]
    assert 1 < len(passes) < 20
    assert len(set(lengths)) == len(lengths)  # one each
    assert replayed["tokens"] == plain["tokens"]
    for one, other in zip(replayed["history"], plain["history"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_captured_run_that_was_stopped_ends_where_a_whole_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[Any]
) -> None:
    write_pairs_of_many_lengths(tmp_path)
    monkeypatch.setattr(TextTask, "is_captured", lambda *_: True)
    recipe, corpus = small("translation", tmp_path, "model.dropout=0.1", "run.tokens=100", "schedule.updates=6")
    train_text(recipe, corpus, tmp_path / "whole", device="cpu")
    train_until(3, recipe, corpus, tmp_path / "stopped", monkeypatch)
    train_text(recipe, corpus, tmp_path / "stopped", device="cpu", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


class Learner:
    """A small network whose pass is captured, and the gradients that a batch should have."""

    def __init__(self) -> None:
        self.network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.parameters = [*self.network.parameters(), self.unused]

    def run(self, batch: Batch) -> torch.Tensor:
        loss = self.network(batch["x"]).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def expected(self, batch: Batch) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.network(batch["x"]).square().mean(), list(self.network.parameters())))

    def found(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.network.parameters()]


@pytest.mark.parametrize(("most", "captured_shapes"), [(128, 3), (2, 2)])
def test_batches_of_any_shape_get_their_gradients_and_the_number_of_graphs_is_bounded(
    monkeypatch: pytest.MonkeyPatch, passes: list[Any], most: int, captured_shapes: int
) -> None:
    monkeypatch.setattr(captured, "MOST", most)
    learner = Learner()
    replayed = CapturedPasses(learner.run, learner.parameters, CPU)
    for rows in (2, 5, 2, 7, 5, 7, 2):
        batch = {"x": torch.randn(rows, 3)}
        loss = replayed(batch)
        assert loss.item() == pytest.approx(learner.network(batch["x"]).square().mean().item())
        torch.testing.assert_close(learner.found(), learner.expected(batch))
        for parameter in learner.parameters:
            parameter.grad = None
    assert learner.unused.grad is None
    assert len(passes) == captured_shapes


def test_graphs_share_one_set_of_gradients(passes: list[Any]) -> None:
    learner = Learner()
    replayed = CapturedPasses(learner.run, learner.parameters, CPU)
    held = []
    for rows in (2, 5, 2):
        replayed({"x": torch.randn(rows, 3)})
        held.append([gradient.data_ptr() for gradient in learner.found() if gradient is not None])
    assert len(held[0]) == 4
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize(
    ("task", "changes", "device", "processes", "expected"),
    [
        ("language", (), CUDA, 1, True),
        ("masked", (), CUDA, 1, True),
        ("translation", ("run.compile=false",), CUDA, 1, True),
        ("translation", (), CUDA, 1, False),  # compiled again for every shape
        ("translation", ("run.compile=false", "run.graph=no"), CUDA, 1, False),
        ("translation", ("run.compile=false", "run.accumulate=2"), CUDA, 1, False),
        ("translation", ("run.compile=false", "model.name=hf:folder"), CUDA, 1, False),  # may drop layers
        ("translation", ("run.compile=false",), CUDA, 2, False),
        ("translation", ("run.compile=false",), CPU, 1, False),
        ("language", ("run.graph=no",), CUDA, 1, False),
        ("language", ("run.compile=false",), CUDA, 1, False),
        ("language", ("run.accumulate=2",), CUDA, 1, False),
        ("language", (), CUDA, 2, False),
        ("language", (), CPU, 1, False),
    ],
)
def test_a_pass_is_captured_where_batches_are_whole_and_of_few_shapes(
    tmp_path: Path, task: str, changes: tuple[str, ...], device: torch.device, processes: int, expected: bool
) -> None:
    recipe, corpus = small(task, tmp_path, "run.compile=true", *changes)
    assert TASKS[task](recipe, corpus).is_captured(device, processes) is expected


def test_the_memory_of_a_graph_is_freed_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[weakref.ref[Any]] = []

    def noted(step: Any, *_: Any) -> Callable[[], object]:
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
