"""Count the steps that an optimizer takes, even if only the GPU knows which were skipped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from factorized.decay.strength import Number, check_number


class StepCount:
    """The steps taken so far, and what a schedule says for the next one."""

    def __init__(self, taken: int = 0) -> None:
        self._known = taken
        self._begun = 0  # since then, whether taken or not
        self._taken: Tensor | None = None  # since then, on the device that decides
        self._numbers: Tensor | None = None  # the schedule's, for every count that may be the present one

    def __int__(self) -> int:
        """Return the steps taken; this waits for a device that counts."""
        return self._known + (0 if self._taken is None else int(self._taken.item()))

    def add(self, passed: Tensor | None) -> None:
        """Count a step. ``passed`` is 1 or 0 on a device that is not waited for; None if the step is taken."""
        if passed is None:
            self._known, self._begun, self._taken, self._numbers = int(self) + 1, 0, None, None
            return
        if self._taken is None:
            self._taken = torch.zeros((), dtype=torch.int64, device=passed.device)
        self._taken.add_(passed.long())
        self._begun += 1

    def scheduled(self, schedule: Callable[[int], Number], passed: Tensor | None) -> Number:
        """Return the number for the next step; where a device counts, it is looked up there."""
        latest = int(self) if passed is None else self._known + self._begun
        number = schedule(latest)
        check_number(f"strength at step {latest}", number)
        if passed is None:
            return number
        if self._numbers is None:
            self._numbers = torch.zeros(1024, device=passed.device)
        if self._begun == len(self._numbers):
            self._numbers = torch.cat([self._numbers, torch.zeros_like(self._numbers)])
        entry = self._numbers[self._begun]
        entry.copy_(number) if isinstance(number, Tensor) else entry.fill_(number)
        if self._taken is None:
            return number
        place = self._taken.clamp(max=self._begun)  # which a captured graph, replayed, would exceed
        return self._numbers.index_select(0, place.reshape(1)).reshape(())
