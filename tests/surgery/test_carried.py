"""What was put on a layer or its weight: carried to the factorized layer and back, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from tests.models.unchanged import unchanged
from tests.surgery.test_factorize import stack


def test_plain_attributes_of_a_weight_go_to_its_factors_and_those_of_a_layer_to_the_new_one_and_back() -> None:
    model = stack()
    model[3].weight.no_weight_decay = True
    model[3].weight.optim = {"lr": 0.1}
    model[3].role = "bottleneck"
    fz.factorize(model, fz.LowRank(), rank=2)
    for factor in model[3].factors:
        assert factor.no_weight_decay is True
        assert factor.optim == {"lr": 0.1}
    assert model[3].role == "bottleneck"
    assert vars(model[4].U) == {}
    assert not hasattr(model[4], "role")
    assert fz.compose(model)[3].role == "bottleneck"
    assert fz.lower(model)[3].role == "bottleneck"


def test_hooks_around_a_factorized_layer_go_on_in_what_it_is_composed_to() -> None:
    model = fz.factorize(stack(), rank=2)
    seen: list[str] = []
    model[3].register_forward_hook(lambda module, _, keys, out: seen.append("after"), with_kwargs=True)
    model[3].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[3].register_full_backward_hook(lambda *_: seen.append("backward"))
    for plain in (fz.compose(model), fz.lower(model)):
        plain(torch.randn(2, 3, 8)).sum().backward()
        assert seen == ["before", "after", "backward"]
        seen.clear()


def hook_on_the_weight(layer: nn.Module) -> None:
    layer.weight.register_hook(lambda gradient: gradient)


def hook_on_the_layer(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda *_: None)


def attribute_of_the_tensor(layer: nn.Module) -> None:
    layer.weight.tensor_model_parallel = True


def attribute_with_a_taken_name(layer: nn.Module) -> None:
    layer.rank = 3


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (hook_on_the_weight, "3: its weight has a gradient hook.*register one on the factors afterwards"),
        (hook_on_the_layer, "3: has hooks that a replacement would lose"),
        (attribute_of_the_tensor, "3: its weight has the attribute 'tensor_model_parallel'.*delete the attribute"),
        (attribute_with_a_taken_name, "3: its attribute 'rank' has the name of one that FactorizedLinear has"),
    ],
)
def test_what_was_put_on_a_layer_after_planning_and_would_be_lost_is_refused(put: Any, message: str) -> None:
    model = stack()
    plan = fz.plan(model, rank=2)
    put(model[3])
    with unchanged(model), pytest.raises(ValueError, match=f"^{message}.*Nothing was changed"):
        fz.factorize(model, plan)


def test_factorizing_twice_says_how_to_start_anew() -> None:
    model = fz.factorize(stack(), rank=2)
    with pytest.raises(ValueError, match=r"already factorized; fz\.truncate lowers its rank"):
        fz.factorize(model, rank=1)
