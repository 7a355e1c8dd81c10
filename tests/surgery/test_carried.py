"""What was put on a layer or its weight: carried to the factorized layer and back, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
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


def called(layer: nn.Module, x: torch.Tensor, then: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return then(layer(x))


class CallsFromPlainContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.attend = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.order: list[Any] = [self.first]
        self.order.append(self.order)  # plain data may hold itself
        self.by_name = {"second": (self.second, "relu")}
        self.__dict__["hidden"] = self.third
        self.call = [self.third.forward]
        self.again = partial(partial(called, self.third), then=self.second.forward)
        self.attention = {"self": [self.attend.self_attn]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.call[0](self.hidden(self.by_name["second"][0](self.order[0](x)))))
        return self.attention["self"][0](x, x, x, need_weights=False)[0]


@pytest.mark.filterwarnings("ignore:lowered")  # attention, which torch cannot hold smaller
@pytest.mark.parametrize("attention", ["layers", "heads"])
def test_layers_that_a_model_calls_from_plain_lists_dicts_partials_and_attributes_are_replaced_there_too(
    attention: Any, tmp_path: Path
) -> None:
    model, x = CallsFromPlainContainers().eval(), torch.randn(2, 3, 16)
    fz.factorize(model, rank=4, attention=attention, keep_first_and_last=False, min_size=0)
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, CallsFromPlainContainers()).eval()
    shorter = fz.truncate(fz.load(tmp_path, CallsFromPlainContainers()), rank=2).eval()
    assert (shorter(x) - model(x)).abs().max() > 1e-4
    for made in (model, loaded, shorter, fz.compose(model), fz.lower(model)):
        assert made.order[0] is made.first
        assert made.by_name == {"second": (made.second, "relu")}
        assert made.hidden is made.third
        assert made.call == [made.third.forward]
        assert (made.again.args, made.again.keywords) == ((made.third,), {"then": made.second.forward})
        assert made.attention == {"self": [made.attend.self_attn]}
        if made is not shorter:
            torch.testing.assert_close(made(x), model(x))
    model(x).sum().backward()
    assert model.second.U.grad is not None


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
        (attribute_with_a_taken_name, "3: its attribute 'rank' has the same name as one of FactorizedLinear"),
    ],
)
def test_what_was_put_on_a_layer_after_planning_and_would_be_lost_is_refused(put: Any, message: str) -> None:
    model = stack()
    plan = fz.plan(model, rank=2)
    put(model[3])
    with unchanged(model), pytest.raises(ValueError, match=f"^{message}.*Nothing was changed"):
        fz.factorize(model, plan)


def test_a_weight_in_the_memory_of_another_parameter_is_refused_if_the_plan_knew_of_none() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    plan = fz.plan(model, rank=2)
    model[2].weight.data = model[1].weight.data
    with unchanged(model), pytest.raises(ValueError, match=r"^1: its weight shares memory with 2\.weight.*Nothing was"):
        fz.factorize(model, plan)


def test_factorizing_twice_says_how_to_start_again() -> None:
    model = fz.factorize(stack(), rank=2)
    with pytest.raises(ValueError, match=r"already factorized; fz\.truncate lowers its rank"):
        fz.factorize(model, rank=1)
