from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.decay.hook import Step
from tests.decay.models_for_decay import difference


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize(("overflowed", "rate"), [(0.0, 0.5), (1.0, 0.0), (2.0, 0.0)])
def test_a_step_that_will_be_skipped_has_no_rate_however_many_devices_overflowed(
    lr: float | torch.Tensor, overflowed: float, rate: float
) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter], lr=lr, fused=True)
    optimizer.found_inf = torch.tensor(overflowed)  # as GradScaler says it: the sum over devices
    assert float(Step(optimizer).rate(parameter)) == rate


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("skips", [False, True], ids=["raises", "skips"])
def test_a_step_that_lamb_does_not_take_leaves_packed_weights_and_factors_alone(
    skips: bool, with_closure: bool, capturable: bool
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([fz.FactorizedLinear(6, 5, 2), nn.MultiheadAttention(8, 2)])
    optimizer = fz.Lamb(fz.parameter_groups(model, 0.1), skip_nonfinite=skips, capturable=capturable)
    decay = fz.FrobeniusDecay(model, lambda step: 0.1 / (step + 1), decoupled=True).attach(optimizer)

    def step(filling: float) -> None:
        def closure() -> float:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, filling)
            return filling

        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    step(1.0)
    assert decay.steps == 1
    before = deepcopy(model)
    with nullcontext() if skips else pytest.raises(ValueError, match="the step was not taken"):
        step(float("nan"))
    assert difference(model, before) == 0
    assert decay.steps == 1
    step(1.0)
    assert difference(model, before) > 1e-4
    assert decay.steps == 2
