"""Several runs in one process take turns to issue steps, each with its own CUDA stream and random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Generic, TypeVar

import torch

from factorized.experiments.data.explain import in_words
from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.own_numbers import OwnNumbers
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.result import Result

Trainer = TypeVar("Trainer")
Turns = Generator[None, None, None]  # a run, or one run after another: each ``next`` is a turn
# Steps that a run issues to a GPU in a turn: with one to forty, three runs gain as much, with a hundred less
# (docs/log.md). What is issued keeps the GPU busy while the thread evaluates or saves another run.
STEPS = 10


class Turn:
    """While entered, work goes to a run's own stream, and torch's default generators draw the run's own numbers.

    A turn begins when the GPU has done what was issued in the run's last one; it works for the other runs meanwhile.
    A graph that is captured in a turn belongs to it: replayed elsewhere, it would share its numbers and the workspaces
    of cuBLAS, which are the stream's, with others.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = OwnNumbers(torch.device("cpu"))
        self._stream: torch.cuda.Stream | None = None
        self._current: AbstractContextManager[None] = nullcontext()
        self._generators: tuple[torch.Generator, torch.Generator] | None = None  # of all, and of this run
        if device.type == "cuda":
            number = torch.cuda.current_device() if device.index is None else device.index
            self._stream = torch.cuda.Stream(number)
            self._stream.wait_stream(torch.cuda.current_stream(number))
            self._current = torch.cuda.stream(self._stream)
            own = torch.Generator(torch.device("cuda", number))
            self._generators = torch.cuda.default_generators[number], own

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._current.__enter__()
        self._numbers.__enter__()
        self._swap()

    def __exit__(self, *exception: object) -> None:
        self._swap()
        self._numbers.__exit__()
        self._current.__exit__(None, None, None)

    def _swap(self) -> None:
        """Exchange the state of the GPU's default generator and the state that is kept here."""
        if self._generators is not None:
            default, own = self._generators
            self._generators = default, default.graphsafe_get_state()
            default.graphsafe_set_state(own)  # the state itself and no copy: graphs are tied to it


def take_turns(runs: Sequence[tuple[AbstractContextManager[None], Turns]]) -> None:
    """Give the runs turns, one after the other, until all have ended; one that has to stop may save itself first."""
    going, stopped = list(runs), None
    with ExitStack() as closing:
        for _, run in runs:
            closing.callback(run.close)
        while going:
            for turn, run in tuple(going):
                try:
                    with turn:
                        next(run)
                except StopIteration:
                    going.remove((turn, run))
                except Interrupted as interrupted:
                    going.remove((turn, run))
                    stopped = interrupted
    if stopped is not None:
        raise stopped


class Queue(Generic[Trainer]):
    """Seeds that wait for a trainer, and how those that had one ended."""

    def __init__(
        self,
        seeds: Sequence[int],
        build: Callable[[int], Trainer],
        fits: Callable[[Trainer, int], bool],  # whether a trainer can train that seed too
        begin: Callable[[Trainer, int, Reporter], Generator[None, None, Result]],
        *,
        go_on: bool,  # with the others where one fails
    ) -> None:
        self.waiting, self.build, self.fits, self.begin, self.go_on = deque(seeds), build, fits, begin, go_on
        self.results: dict[int, Result] = {}
        self.errors: dict[int, Exception] = {}

    def work(self, trainer: Trainer | None, reporter: Reporter) -> Turns:
        """Train one waiting seed after another, with ``trainer`` or one that is built for the first of them."""
        while self.waiting:
            seed = self.waiting.popleft()
            try:
                if trainer is None or not self.fits(trainer, seed):
                    trainer = self.build(seed)
                self.results[seed] = yield from self.begin(trainer, seed, reporter)
            except Interrupted:
                raise
            except Exception as error:
                if not self.go_on:
                    raise
                if trainer is None and isinstance(error, torch.OutOfMemoryError):
                    self.waiting.appendleft(seed)
                    reporter.note("the device has no memory for one more run at once; the others continue without it")
                    return
                self.errors[seed] = error
                reporter.note(f"seed {seed} failed, the others continue: {message_of(error)}")


class RunsFailed(ValueError):
    """Some of several runs failed; the others have ended."""

    def __init__(self, errors: dict[int, Exception], folder: Path) -> None:
        told = "; ".join(f"seed {seed}: {message_of(error)}" for seed, error in errors.items())
        super().__init__(f"{len(errors)} run(s) in {folder} failed, and the others have ended. {told}")
        self.errors = errors  # by seed


def message_of(error: Exception) -> str:
    """Return the message of an error that ended a run, in one line."""
    words = in_words(error)
    return words if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {words}"
