"""What shares a packed weight with factors, under optimizers of both kinds of decay."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import factorized as fz
from tests.attention.attention_zoo import GPT2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "maximizing": lambda groups: torch.optim.SGD(groups, lr=0.1, maximize=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1),
}


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_rest_of_packed_weights_is_decayed_as_the_optimizer_would_have(
    make: Callable[[Any], torch.optim.Optimizer], decoupled: bool
) -> None:
    model = GPT2.make()
    expected = deepcopy(model)
    optimizer = make(fz.parameter_groups(model, 0.05))
    fz.FrobeniusDecay(model, 0.37, decoupled=decoupled).attach(optimizer)
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
