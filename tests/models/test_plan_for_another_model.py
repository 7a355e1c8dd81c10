from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

import factorized as fz
from tests.models.stack import shared_module, shared_weight, stack
from tests.models.unchanged import unchanged


def without_a_layer() -> nn.Module:
    return nn.Sequential(*stack()[:4])


def of_another_type() -> nn.Module:
    model = stack()
    model[3] = nn.Conv1d(12, 12, 1)
    return model


def of_another_shape() -> nn.Module:
    model = stack()
    model[3] = nn.Linear(12, 13)
    return model


def weight_shared_with_the_last() -> nn.Module:
    model = stack()
    model[5] = nn.Linear(12, 12)
    model[5].weight = model[3].weight
    return model


def already_factorized() -> nn.Module:
    return fz.factorize(stack(), rank=2)


@pytest.mark.parametrize(
    ("planned_for", "given", "message"),
    [
        (stack, without_a_layer, "4 is missing"),
        (stack, of_another_type, "3 is Conv1d, not Linear"),
        (stack, of_another_shape, "3 has shape 13x12, not 12x12"),
        (stack, already_factorized, "2 is FactorizedLinear, not Linear"),
        (stack, shared_module, "3 is the module at 3 and 4; in the plan, at 3"),
        (shared_module, stack, "3 is the module at 3; in the plan, at 3 and 4"),
        (stack, shared_weight, "3 shares its weight with 4; in the plan, with no other layer"),
        (shared_weight, stack, "3 shares its weight with no other layer; in the plan, with 4"),
        (stack, weight_shared_with_the_last, "3 shares its weight with 5; in the plan, with no other layer"),
    ],
)
def test_a_plan_for_another_model_says_what_differs_and_changes_nothing(
    planned_for: Callable[[], nn.Module], given: Callable[[], nn.Module], message: str
) -> None:
    plan, model = fz.plan(planned_for(), rank=2), given()
    with unchanged(model), pytest.raises(ValueError, match=rf"another model \(Sequential\): .*{message}") as caught:
        fz.factorize(model, plan)
    assert "nothing was changed" in str(caught.value)


def test_a_plan_that_has_a_layer_twice_is_refused() -> None:
    plan, model = fz.plan(stack(), rank=2), stack()
    with unchanged(model), pytest.raises(ValueError, match=r"another model \(Sequential\): 2 is in the plan twice"):
        fz.factorize(model, replace(plan, entries=(*plan.entries, *plan.layers[:1])))


def test_a_plan_that_ties_a_layer_to_one_it_leaves_alone_is_refused() -> None:
    model = shared_weight()
    plan = fz.plan(model, rank=2)
    entries = tuple(replace(e, format=None) if e.name == "3" else e for e in plan.entries)
    with unchanged(model), pytest.raises(ValueError, match="4 is tied to 3, which the plan does not factorize"):
        fz.factorize(model, replace(plan, entries=entries))
