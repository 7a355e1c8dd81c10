"""Runs that end early: SIGTERM and Ctrl-C stop them between two steps, or their folder cannot be written."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

PATIENCE = 2.0  # seconds within which several processes ignore a repeated signal


class Interrupted(Exception):
    """Raised by a run that was asked to stop, after it has saved its state."""

    kept = "its state is saved"

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number, self.exit_code = number, 128 + number

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int]]:
        return type(self), (self.number,)  # from one process to another


class CannotWrite(ValueError):
    """A run that could not write to its folder, where the checkpoint before is whole."""

    kept, exit_code = "the last checkpoint is kept", 2


class StopRequest:
    """Context manager that remembers a signal instead of exiting; a second signal exits at once.

    Where one lies within another, a signal that came too late for the inner one is passed on to the outer one.
    With ``patience``, that many seconds must lie between the two: under ``torchrun`` Ctrl-C reaches a process from the
    terminal, and once more from the launcher.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, patience: float = 0.0) -> None:
        self.number: int | None = None
        self._patience, self._asked = patience, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals never arrive
            self._before = {number: signal.getsignal(number) for number in self.SIGNALS}  # whole before one arrives
            for number in self.SIGNALS:
                signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: one that was not set from Python
        outer = getattr(self._before.get(signal.SIGINT), "__self__", None)  # whose _remember that is
        if isinstance(outer, StopRequest) and outer.number is None:
            outer.number, outer._asked = self.number, self._asked

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal has come."""
        if self.number is not None:
            raise Interrupted(self.number)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._asked = number, time.monotonic()
        elif time.monotonic() - self._asked >= self._patience:
            before = self._before[signal.SIGINT]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt


class OneInterrupt:
    """Makes Ctrl-C raise ``KeyboardInterrupt`` once in the life of a process; the next one ends it at once.

    Python's own handler raises again while the first one is being handled, or while the interpreter ends, and what
    comes of that is a traceback.
    """

    def __init__(self) -> None:
        self.taken = False
        self._hook = sys.unraisablehook

    def install(self) -> None:
        """Take the place of Python's handler, for as long as the process lives."""
        signal.signal(signal.SIGINT, self._raise_once)
        sys.unraisablehook = self._unraisable

    def close(self, exit_code: int) -> None:
        """From now on, while the interpreter ends, let Ctrl-C end it with the exit code that it would have."""
        signal.signal(signal.SIGINT, lambda *_: os._exit(exit_code))

    def _raise_once(self, number: int, frame: FrameType | None) -> None:
        if self.taken or _is_importing(frame):
            self._leave()
        self.taken = True
        raise KeyboardInterrupt

    def _unraisable(self, problem: sys.UnraisableHookArgs) -> None:
        if isinstance(problem.exc_value, KeyboardInterrupt):  # in a destructor, where nobody can catch it
            self._leave()
        self._hook(problem)

    def _leave(self) -> None:
        os.write(2, b"factorized: stopped by Ctrl-C\n")
        os._exit(128 + signal.SIGINT)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported: torch's C++ code calls Python there, and aborts if that raises."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
