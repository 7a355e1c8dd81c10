"""What is given for a model and is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz

NO_MODELS = [
    (nn.Linear, r"got the class Linear; make one first: Linear\(...\)"),
    ({"weight": torch.ones(2, 2)}, "got a dict; load a state dict into a model first"),
    ([nn.Linear(2, 2)], "got a list; put several modules into one"),
    (None, "got None; pass the model itself"),
    (torch.optim.SGD([torch.ones(1)], 0.1), "got a value of type SGD; pass the model itself"),
]
CALLS = {
    "plan": lambda model: fz.plan(model, rank=1),
    "factorize": lambda model: fz.factorize(model, rank=1),
    "factorize_attention": lambda model: fz.factorize_attention(model),
    "spectral_init_attention": lambda model: fz.spectral_init_attention(model),
    "compose": lambda model: fz.compose(model),
    "lower": lambda model: fz.lower(model),
    "forms": lambda model: fz.forms(model),
    "parameter_groups": lambda model: fz.parameter_groups(model, 1e-4),
    "FrobeniusDecay": lambda model: fz.FrobeniusDecay(model, 1e-4),
    "NuclearDecay": lambda model: fz.NuclearDecay(model, 1e-4),
    "NormMatcher": lambda model: fz.NormMatcher(model),
    "diagnose": lambda model: fz.diagnose(model, 0.1),
    "margin_bounds": lambda model: fz.margin_bounds(model, []),
    "autotune": lambda model: fz.autotune(model, torch.ones(1)),
    "drop_connect": lambda model: fz.drop_connect(model, 0.5),
    "save": lambda model: fz.save(model, "no/such/folder"),
    "load": lambda model: fz.load("no/such/folder", model),
    "load_dense": lambda model: fz.load_dense(model, {}),
    "save_pretrained": lambda model: fz.save_pretrained(model, "no/such/folder"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(("given", "message"), NO_MODELS, ids=["class", "state dict", "list", "None", "optimizer"])
def test_what_is_no_model_is_refused_by_every_call_that_takes_one(given: Any, message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=f"^model must be an nn.Module, {message}"):
        call(given)
