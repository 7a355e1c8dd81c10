from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from tests.decay.models_for_decay import layers, loss_of, mixed


class ScaleNorm(nn.Module):
    """A norm of the user's own, known by its name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


class Parts(nn.Module):
    """One of each thing that decay treats in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.product = fz.FactorizedConv2d(6, 8, 3, 2, groups=2, depth=1)
        self.wide = fz.FactorizedLinear(4, 5, 9)
        self.dense = nn.Linear(4, 4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.own = ScaleNorm()
        self.scale = nn.Parameter(torch.ones(1))


WEIGHTS = {"dense.weight", "scale"}
BIASES = {"dense.bias", "product.bias", "wide.bias"}
NORMS = {"batch_norm.weight", "batch_norm.bias", "layer_norm.weight", "layer_norm.bias", "own.gain"}
PRODUCT = {"product.U", "product.V", "product.inner.0"}
WIDE = {"wide.U", "wide.V"}


def strengths(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, float]:
    """Return the decay of every parameter by name, having checked that each is in one group, once."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    listed = [(names[parameter], group["weight_decay"]) for group in groups for parameter in group["params"]]
    assert len(listed) == len(dict(listed))
    return dict(listed)


@pytest.mark.parametrize(
    ("flags", "decayed"),
    [
        ({}, WEIGHTS),
        ({"decay_norms": True}, WEIGHTS | NORMS),
        ({"decay_biases": True}, WEIGHTS | BIASES),
        ({"decay_norms": True, "decay_biases": True}, WEIGHTS | BIASES | NORMS),
    ],
)
def test_flags_say_what_is_decayed_and_factors_never_are(flags: dict[str, bool], decayed: set[str]) -> None:
    model = Parts()
    found = strengths(model, fz.parameter_groups(model, 0.25, **flags))
    everything = WEIGHTS | BIASES | NORMS | PRODUCT | WIDE
    assert found == {name: 0.25 if name in decayed else 0.0 for name in everything}


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.LSTM(4, 3)])
def test_biases_are_known_by_their_names_whatever_module_holds_them(model: nn.Module) -> None:
    found = strengths(model, fz.parameter_groups(model, 0.25, attention=()))
    assert {name for name, number in found.items() if number == 0} == {name for name in found if "bias" in name}


def test_frozen_parameters_are_left_out() -> None:
    model = Parts()
    for parameter in (model.product.U, model.dense.weight, model.own.gain, model.wide.bias):
        parameter.requires_grad_(False)
    found = strengths(model, fz.parameter_groups(model, 0.25))
    frozen = {"product.U", "dense.weight", "own.gain", "wide.bias"}
    assert found.keys() == (WEIGHTS | BIASES | NORMS | PRODUCT | WIDE) - frozen


def test_groups_without_parameters_are_left_out() -> None:
    groups = fz.parameter_groups(nn.Sequential(nn.Linear(3, 3, bias=False)), 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1]


def test_tied_factors_stand_in_one_group_once() -> None:
    model = nn.Sequential(*(fz.FactorizedLinear(8, 8, 3) for _ in range(2)))
    model[1].share_factors(model[0])
    for crs in (False, True):
        assert strengths(model, fz.parameter_groups(model, 0.1, crs=crs)).keys() == {"0.U", "0.V", "0.bias", "1.bias"}


def test_compression_rate_scaling_decays_factors_by_their_share_of_the_dense_weight() -> None:
    model = Parts()
    found = strengths(model, fz.parameter_groups(model, 0.25, crs=True))
    # Per group the matrix is (4·3) × (3·3) of rank 2; the wide layer has more entries than its weight.
    product = 0.25 * 2 * (12 * 2 + 2 * 2 + 9 * 2) / (8 * 3 * 3 * 3)
    wide = 0.25 * 9 * (4 + 5) / (4 * 5)
    assert [found[name] for name in PRODUCT] == pytest.approx([product] * 3)
    assert [found[name] for name in WIDE] == pytest.approx([wide] * 2)
    assert {name for name in found if name not in PRODUCT | WIDE and found[name] == 0.25} == WEIGHTS


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_decays_the_dense_weights_and_not_the_factors(make: Callable[..., torch.optim.Optimizer]) -> None:
    def moved(weight_decay: float) -> dict[str, torch.Tensor]:
        model = mixed()
        optimizer = make(fz.parameter_groups(model, weight_decay), lr=0.01)
        loss_of(model, 0).backward()
        optimizer.step()
        return dict(model.named_parameters())

    plain, decayed = moved(0.0), moved(0.5)
    differing = {name for name in plain if not torch.equal(plain[name], decayed[name])}
    assert differing == {"head.weight"}


def test_without_scaling_all_factors_share_the_last_group() -> None:
    model = mixed()
    factors = {factor for layer in layers(model).values() for factor in layer.factors}
    assert set(fz.parameter_groups(model, 0.1)[-1]["params"]) == factors
