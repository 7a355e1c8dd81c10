"""Several runs at once in one process, on the CPU: each ends as it does alone."""

from __future__ import annotations

import json
import re
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from factorized.experiments.data.images import Images
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training import train as train_module
from factorized.experiments.training import trainer as trainer_module
from factorized.experiments.training.evaluate import Evaluator
from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.source import OnDevice
from factorized.experiments.training.step import TrainingStep
from factorized.experiments.training.train import train
from factorized.experiments.training.trainer import SMALL, Trainer
from factorized.experiments.training.turns import RunsFailed, Turn
from tests.experiments.training import smooth
from tests.experiments.training.small import STEPS, Signals, assert_same_run, digits, metrics, recipe, state_of
from tests.experiments.training.test_progress import shown_in

# crops, flips and dropout draw random numbers in every step
CHANCE = ("data.crop_padding=2", "data.flip=true", f"model.name='{smooth.WITH_DROPOUT}'")


def chance(*changes: str) -> Recipe:
    return recipe(*CHANCE, *changes)


@pytest.mark.parametrize("change", ["data.place=device", "data.place=loader", "factorize.energy=0.6"])
def test_runs_at_once_end_bit_for_bit_as_they_do_alone(tmp_path: Path, change: str) -> None:
    changed = chance(change, "run.diagnose=true", "run.evaluate_every=2")
    results = train(changed, digits(), tmp_path / "at_once", seeds=(3, 0, 5), at_once=3, device="cpu")
    assert [result["seed"] for result in results] == [3, 0, 5]
    for seed in (3, 0, 5):
        train(changed, digits(), tmp_path / "alone", seeds=(seed,), device="cpu")
        assert_same_run(tmp_path / "at_once", tmp_path / "alone", seed)
        rows = (tmp_path / f"at_once/seed-{seed}/metrics.jsonl").read_text().splitlines()
        assert metrics(list(map(json.loads, rows))) == metrics(state_of(tmp_path / "alone", seed).history)
        assert len(list((tmp_path / f"at_once/seed-{seed}").glob("events.out.tfevents.*"))) == 1


def test_a_run_that_ends_makes_room_for_the_next_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    steps: list[TrainingStep] = []

    class Source(OnDevice):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self.x)

    original = TrainingStep.__call__

    def watched(self: TrainingStep) -> None:
        steps.append(self)
        original(self)

    monkeypatch.setattr(trainer_module, "OnDevice", Source)
    monkeypatch.setattr(TrainingStep, "__call__", watched)
    train(chance(), digits(), tmp_path, seeds=range(5), at_once=2, device="cpu")
    assert len(made) == 2
    assert made[0] is made[1]  # one copy of the images
    first, second = dict.fromkeys(steps)
    assert steps[: 8 * STEPS] == [first, second] * (4 * STEPS)
    assert set(steps[8 * STEPS :]) == {first}
    assert all((tmp_path / f"seed-{seed}/result.json").is_file() for seed in range(5))


def test_while_a_run_is_tested_the_others_have_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, Evaluator]] = []

    class Watched(Evaluator):
        def begin(self) -> None:
            events.append(("begin", self))
            super().begin()

        def end(self) -> tuple[float, float]:
            events.append(("end", self))
            return super().end()

    monkeypatch.setattr(trainer_module, "Evaluator", Watched)
    train(chance("schedule.epochs=1"), digits(), tmp_path, seeds=(0, 1), at_once=2, device="cpu")
    first, second = dict.fromkeys(run for _, run in events)
    assert events == [("begin", first), ("begin", second), ("end", first), ("end", second)]


def test_the_result_tells_how_many_ran_at_once_whenever_it_was(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(chance(), digits(), tmp_path, seeds=(0, 1), at_once=2, device="cpu", reporter=Once(epoch=1, step=0))
    train(chance(), digits(), tmp_path, seeds=(0,), device="cpu", resume=True)
    results = train(chance(), digits(), tmp_path, seeds=(0, 1, 2), device="cpu", resume=True)
    assert [result["machine"]["runs_at_once"] for result in results] == [2, 2, 1]


class Once(Signals):
    """Sends its signal for the first run that comes to the step."""

    def __init__(self, *, epoch: int, step: int) -> None:
        super().__init__(signal.SIGINT, epoch=epoch, step=step)
        self.sent: list[bool] = []  # shared by the reporters of all runs

    def _send(self, epoch: int, step: int | None) -> None:
        if not self.sent and (epoch, step) == self.at:
            self.sent.append(True)
            super()._send(epoch, step)


def test_a_signal_saves_every_run_and_all_go_on_to_the_same_bits(tmp_path: Path) -> None:
    changed = chance()
    train(changed, digits(), tmp_path / "whole", seeds=(0, 1, 2), device="cpu")
    with pytest.raises(Interrupted, match="SIGINT"):
        train(
            changed,
            digits(),
            tmp_path / "cut",
            seeds=(0, 1, 2),
            at_once=3,
            device="cpu",
            reporter=Once(epoch=1, step=1),
        )
    places = [(state_of(tmp_path / "cut", seed).epoch, state_of(tmp_path / "cut", seed).step) for seed in (0, 1, 2)]
    assert places == [(1, 3)] * 3
    train(changed, digits(), tmp_path / "cut", seeds=(0, 1, 2), at_once=2, device="cpu", resume=True)
    for seed in (0, 1, 2):
        assert_same_run(tmp_path / "cut", tmp_path / "whole", seed)


def test_a_run_that_fails_leaves_the_others_going_and_is_named_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._begin

    def broken(self: Trainer, state: object) -> None:
        original(self, state)  # type: ignore[arg-type]
        if state.seed == 1:  # type: ignore[attr-defined]
            next(self.network.parameters()).data.fill_(torch.nan)

    monkeypatch.setattr(Trainer, "_begin", broken)
    reporter, said = shown_in(terminal=False, width=400)
    with pytest.raises(RunsFailed, match=r"1 run\(s\) in .* failed, and the others have ended\. seed 1: .* is nan"):
        train(chance(), digits(), tmp_path / "a", seeds=range(4), at_once=3, device="cpu", reporter=reporter)
    assert "seed 1 failed, the others continue: the training loss is nan" in said.getvalue()
    assert [(tmp_path / f"a/seed-{seed}/result.json").is_file() for seed in range(4)] == [True, False, True, True]
    monkeypatch.undo()
    train(chance(), digits(), tmp_path / "b", seeds=(3,), device="cpu")  # after the seed that failed, by its trainer
    assert_same_run(tmp_path / "a", tmp_path / "b", 3)


def test_a_device_without_room_for_another_run_trains_fewer_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Trainer] = []

    class Large(Trainer):
        def __init__(self, *arguments: object, **keywords: object) -> None:
            if len(built) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(*arguments, **keywords)  # type: ignore[arg-type]
            built.append(self)

    monkeypatch.setattr(train_module, "Trainer", Large)
    reporter, said = shown_in(terminal=False)
    results = train(chance(), digits(), tmp_path, seeds=range(4), at_once=3, device="cpu", reporter=reporter)
    assert [result["seed"] for result in results] == [0, 1, 2, 3]
    assert "no memory for one more run at once" in said.getvalue()


def test_runs_that_have_ended_take_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(chance(), digits(), tmp_path, seeds=(0, 1), device="cpu")
    built: list[int] = []

    class Watched(Trainer):
        def __init__(self, recipe: Recipe, images: Images, processes: Processes, seed: int, **keywords: object) -> None:
            super().__init__(recipe, images, processes, seed, **keywords)  # type: ignore[arg-type]
            built.append(seed)

    monkeypatch.setattr(train_module, "Trainer", Watched)
    train(chance(), digits(), tmp_path, seeds=(0, 1, 2), at_once=3, device="cpu", resume=True)
    assert len(built) == 1


def test_a_turn_draws_its_own_numbers_and_leaves_those_outside_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    turns = [Turn(torch.device("cpu")), Turn(torch.device("cpu"))]
    drawn: list[list[float]] = [[], []]
    outside = []
    for turn in turns:
        with turn:
            torch.manual_seed(7)
    for _ in range(4):
        for numbers, turn in zip(drawn, turns, strict=True):
            with turn:
                numbers.append(torch.rand(1).item())
        outside.append(torch.rand(1).item())
    assert drawn == [expected.tolist()] * 2
    assert outside == expected.tolist()


def test_every_run_has_a_bar_of_its_own_in_one_display(tmp_path: Path) -> None:
    reporter, said = shown_in(terminal=True)
    train(chance("run.batch=16"), digits(), tmp_path, seeds=(0, 1, 2), at_once=3, device="cpu", reporter=reporter)
    bars = [(task.description, task.completed, task.fields["figures"][:9]) for task in reporter.progress.tasks]
    assert bars == [(f"{chance().name} seed {seed}", 64, "epoch 2/2") for seed in (0, 1, 2)]
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.getvalue())
    assert re.search(r"seed 0 .*\n.*seed 1 .*\n.*seed 2 ", text)


def test_automatically_small_networks_run_at_once_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(chance(), digits(), Processes(torch.device("cpu")), 0)
    assert trainer.runs_at_once == 1
    monkeypatch.setattr(trainer, "device", torch.device("cuda"))
    assert trainer.runs_at_once == 3
    monkeypatch.setattr(trainer, "macs", int(SMALL) // 100)
    assert trainer.runs_at_once == 1


def test_processes_that_train_a_run_together_do_so_one_run_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Processes(torch.device("cpu"), rank=0, count=2)
    monkeypatch.setattr(train_module, "joined_processes", lambda device: nullcontext(both))
    with pytest.raises(ValueError, match="at_once=2 is for one process, and there are 2, which train each run togeth"):
        train(chance(), digits(), tmp_path, seeds=(0, 1), at_once=2, device="cpu")


@pytest.mark.parametrize("at_once", [0, -1])
def test_at_once_is_a_number_of_runs(tmp_path: Path, at_once: int) -> None:
    with pytest.raises(ValueError, match=f"at_once must be 'auto' or a number of runs of at least 1, got {at_once}"):
        train(chance(), digits(), tmp_path, seeds=(0, 1), at_once=at_once, device="cpu", reporter=Reporter(quiet=True))
