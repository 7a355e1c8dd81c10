"""What shares a packed weight with factors, under optimizers of both kinds of decay."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from tests.attention.attention_zoo import GPT2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "maximizing": lambda groups: torch.optim.SGD(groups, lr=0.1, maximize=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1),
}


DECAYS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "coupled": lambda model: [fz.FrobeniusDecay(model, 0.37, decoupled=False)],
    "decoupled": lambda model: [fz.FrobeniusDecay(model, 0.37, decoupled=True)],
    "of strength zero": lambda model: [fz.FrobeniusDecay(model, 0.0, decoupled=False)],
    "nuclear": lambda model: [fz.NuclearDecay(model, 0.1)],
    "both": lambda model: [fz.NuclearDecay(model, 0.1), fz.FrobeniusDecay(model, 0.37, decoupled=True)],
}


@pytest.mark.parametrize("decays", DECAYS.values(), ids=DECAYS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_rest_of_packed_weights_is_decayed_as_the_optimizer_would_have(
    make: Callable[[Any], torch.optim.Optimizer], decays: Callable[[nn.Module], list[Any]]
) -> None:
    model = GPT2.make()
    expected = deepcopy(model)
    optimizer = make(fz.parameter_groups(model, 0.05))
    for decay in decays(model):
        decay.attach(optimizer)
    by_itself = make([{"params": list(expected.parameters()), "weight_decay": 0.05}])
    GPT2.run(model).square().mean().backward()
    optimizer.step()
    GPT2.run(expected).square().mean().backward()
    by_itself.step()
    for one, other in zip(model.transformer.h, expected.transformer.h, strict=True):
        queries_and_keys = (one.attn.c_attn.weight - other.attn.c_attn.weight)[:, : 2 * 24]
        assert queries_and_keys.abs().max() < 1e-12


@pytest.mark.parametrize("decoupled", [False, True])
def test_adafactor_takes_the_decay_of_the_rest_off_the_parameters(decoupled: bool) -> None:
    model = GPT2.make()
    optimizer = torch.optim.Adafactor(fz.parameter_groups(model, 0.05), lr=0.1)
    fz.FrobeniusDecay(model, 0.37, decoupled=decoupled).attach(optimizer)
    weight = model.transformer.h[0].attn.c_attn.weight
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight[:, :48], before[:, :48] * (1 - 0.1 * 0.05), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("left_out", ["without gradient", "frozen"])
def test_a_packed_weight_that_is_not_trained_stays_as_it_is(left_out: str, decoupled: bool) -> None:
    model = GPT2.make()
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.05), lr=0.1)
    fz.FrobeniusDecay(model, 0.37, decoupled=decoupled).attach(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    first, second = (block.attn.c_attn.weight for block in model.transformer.h)
    if left_out == "frozen":
        first.requires_grad_(False)
    else:
        first.grad = None
    before = [weight.detach().clone() for weight in (first, second)]
    optimizer.step()
    assert torch.equal(first, before[0])
    assert not torch.allclose(second[:, :48], before[1][:, :48])


def test_flambe_of_strength_zero_decays_the_rest_as_of_any_other() -> None:
    models = []
    for strength in (0.0, 1e-30):
        model = GPT2.make()
        optimizer = fz.Flambe(fz.parameter_groups(model, 0.05), model, lr=0.1, frobenius_decay=strength)
        GPT2.run(model).square().mean().backward()
        optimizer.step()
        models.append(model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_beside_flambe_which_decays_the_rest_another_penalty_does_not() -> None:
    model = GPT2.make()
    optimizer = fz.Flambe(fz.parameter_groups(model, 0.05), model)
    fz.NuclearDecay(model, 0.1).attach(optimizer)
    GPT2.run(model).square().mean().backward()
    weight = model.transformer.h[0].attn.c_attn.weight
    before = weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(weight.grad[:, :48], before[:, :48])
    assert not torch.allclose(weight.grad[:, 48:], before[:, 48:])
