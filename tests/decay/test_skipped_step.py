from __future__ import annotations

import pytest
import torch
from torch import nn

from factorized.decay.hook import Step


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize(("overflowed", "rate"), [(0.0, 0.5), (1.0, 0.0), (2.0, 0.0)])
def test_a_step_that_will_be_skipped_has_no_rate_however_many_devices_overflowed(
    lr: float | torch.Tensor, overflowed: float, rate: float
) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter], lr=lr, fused=True)
    optimizer.found_inf = torch.tensor(overflowed)  # as GradScaler says it: the sum over devices
    assert float(Step(optimizer).rate(parameter)) == rate
