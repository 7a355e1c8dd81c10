from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from factorized.optim.count import StepCount


@pytest.mark.parametrize("schedule", [float, torch.tensor], ids=["number", "tensor"])
def test_a_schedule_is_looked_up_by_the_steps_taken_however_many_are_skipped(
    schedule: Callable[[int], float | Tensor],
) -> None:
    count, taken = StepCount(5), 5
    for step in range(2500):
        passed = step % 3 > 0
        assert float(count.scheduled(schedule, torch.tensor(float(passed)))) == taken
        count.add(torch.tensor(float(passed)))
        taken += passed
    assert int(count) == taken
    count.add(None)  # parameters were moved to where a step is waited for
    assert int(count) == taken + 1 == count.scheduled(schedule, None)


def test_a_wrong_number_of_a_schedule_is_refused_though_no_device_is_waited_for() -> None:
    with pytest.raises(ValueError, match="strength at step 7 must be a finite number of at least 0, got -1"):
        StepCount(7).scheduled(lambda step: -1, torch.ones(()))
