"""What shrinking keeps of a module besides its matrices: modes, dropout, hooks, and biases wherever they are."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.testing import error
from tests.attention.attention_zoo import BERT


@pytest.mark.parametrize("place", ["", "self"])
def test_hooks_around_the_projections_go_on_and_their_handles_remove_them(place: str) -> None:
    model, calls = BERT.make(), []
    attention = model.encoder.layer[0].attention
    handle = attention.get_submodule(place).register_forward_hook(lambda *_: calls.append(1))
    fz.factorize_attention(model)
    BERT.run(model)
    assert len(calls) == 1
    handle.remove()
    BERT.run(model)
    assert len(calls) == 1


@pytest.mark.parametrize("to_plain", [fz.compose, fz.lower, lambda model: fz.truncate(model, rank=1)])
@pytest.mark.parametrize("place", ["", "self.query", "output.dense"])
@pytest.mark.filterwarnings("ignore:lowered, ")
def test_hooks_on_shrunk_attention_stay_when_it_is_replaced(place: str, to_plain: Any) -> None:
    bert, calls = fz.factorize_attention(BERT.make(), {"qk": 0.5, "ov": 0.75}), []
    bert.encoder.layer[0].attention.get_submodule(place).register_forward_hook(lambda *_: calls.append(1))
    BERT.run(to_plain(bert))
    assert len(calls) == 1
    packed, x = fz.factorize_attention(nn.Sequential(nn.MultiheadAttention(16, 2))), torch.randn(3, 1, 16)
    packed[0].register_forward_pre_hook(lambda *_: calls.append(1))
    to_plain(packed)[0](x, x, x)
    assert len(calls) == 2


def test_plain_attributes_of_projections_and_of_their_weights_go_to_the_new_ones() -> None:
    model = BERT.make()
    query = model.encoder.layer[0].attention.self.query
    query.role, query.weight.no_weight_decay, query.bias.lr_scale = "query", True, 2.0
    fz.factorize_attention(model)
    now = model.encoder.layer[0].attention.self.query
    assert now is not query
    assert fz.compose(model).encoder.layer[0].attention.self.query.role == "query"
    assert (now.role, now.weight.no_weight_decay, now.bias.lr_scale) == ("query", True, 2.0)
    packed = nn.Sequential(nn.MultiheadAttention(16, 2))
    packed[0].role, packed[0].in_proj_weight.no_weight_decay = "first", True
    fz.factorize_attention(packed)
    assert packed[0].role == fz.compose(packed)[0].role == "first"
    assert all(part.no_weight_decay for part in packed.parameters() if hasattr(part, "no_weight_decay"))
    assert sum(hasattr(part, "no_weight_decay") for part in packed.parameters()) == 3


@pytest.mark.parametrize("training", [True, False])
def test_every_module_inside_keeps_its_own_mode(training: bool) -> None:
    model = BERT.make().train(training)
    attention = model.encoder.layer[0].attention
    attention.output.dropout.train(not training)
    modes = {name: module.training for name, module in attention.named_modules()}
    fz.factorize_attention(model)
    for changed in (model, fz.compose(model)):
        now = changed.encoder.layer[0].attention
        assert {name: module.training for name, module in now.named_modules()} == modes


@pytest.mark.parametrize("training", [True, False])
def test_torchs_module_keeps_its_dropout_and_its_mode_there_and_back(training: bool) -> None:
    module = fz.factorize_attention(nn.MultiheadAttention(8, 2, dropout=0.25).train(training))
    for changed in (module, fz.compose(module)):
        assert changed.dropout == 0.25
        assert all(part.training == training for part in changed.modules())


class Uneven(nn.Module):
    """Attention where some projections have a bias and others have none, as in Whisper."""

    def __init__(self, biased: str) -> None:
        super().__init__()
        self.heads = 3
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24, bias=name in biased) for name in "qkvo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("biased", ["q", "k", "v", "o", "qv", "ko"])
@torch.no_grad()
def test_any_of_the_projections_may_have_a_bias_and_none_is_lost(biased: str) -> None:
    torch.manual_seed(0)
    fz.register_attention(Uneven, query="q", key="k", value="v", output="o", heads="heads")
    model, x = nn.Sequential(Uneven(biased)).double(), torch.randn(2, 6, 24, dtype=torch.float64)
    expected, state = model(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert error(fz.factorize_attention(deepcopy(model), 1.0)(x), expected) < 1e-10
    assert error(fz.spectral_init_attention(deepcopy(model))(x), expected) < 1e-10
    small = fz.factorize_attention(model, {"qk": 0.5, "ov": 0.25})
    for plain in (fz.compose(small), fz.lower(small)):
        assert error(plain(x), small(x)) < 1e-10
    assert fz.compose(small).state_dict().keys() == state.keys()
    assert error(fz.load_dense(deepcopy(small), state)(x), small(x)) < 1e-10
