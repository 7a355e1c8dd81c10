"""Stopping politely: SIGTERM and Ctrl-C ask for a stop, and the loop takes it between two steps."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """A run that was asked to stop, and has saved itself."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopRequest:
    """While entered, remembers a signal instead of dying of it; a second one is obeyed at once.

    With ``patience``, that many seconds must lie between the two: under ``torchrun`` Ctrl-C reaches a process from the
    terminal, and once more from the launcher.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, patience: float = 0.0) -> None:
        self.number: int | None = None
        self._patience, self._asked = patience, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals never arrive
            self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: one that was not set from Python

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._asked = number, time.monotonic()
        elif time.monotonic() - self._asked >= self._patience:
            raise KeyboardInterrupt
