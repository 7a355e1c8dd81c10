from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import factorized as fz
from factorized.surgery.describe import describe
from tests.models.stack import shared_module, shared_weight, stack


@pytest.mark.parametrize("make", [stack, shared_module, shared_weight])
def test_a_factorized_model_describes_the_plan_that_it_was_made_by(make: Callable[[], nn.Module]) -> None:
    plan = fz.plan(make(), rank=2)
    described = describe(fz.factorize(make(), plan))
    assert described.layers == plan.layers
    assert (described.params, described.params_after) == (plan.params, plan.params_after)
