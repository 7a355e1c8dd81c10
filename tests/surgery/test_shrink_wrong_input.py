from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from tests.attention.attention_zoo import BERT, LLAMA, MARIAN


def hooked() -> nn.Module:
    model = BERT.make()
    model.encoder.layer[0].attention.self.query.register_forward_hook(lambda *_: None)
    return model


def hooked_gradient() -> nn.Module:
    model = BERT.make()
    model.encoder.layer[0].attention.self.query.weight.register_hook(lambda gradient: gradient)
    return model


def quantized() -> nn.Module:
    model = BERT.make()
    model.encoder.layer[0].attention.output.dense.to(torch.float8_e4m3fn)
    return model


def hooked_backwards() -> nn.Module:
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    model[0].register_full_backward_pre_hook(lambda *_: None)
    return model


def tied() -> nn.Module:
    model = MARIAN.make()
    model.model.encoder.layers[0].self_attn.k_proj.weight = model.model.encoder.layers[0].self_attn.q_proj.weight
    return model


def one_layer_twice() -> nn.Module:
    model = MARIAN.make()
    attention = model.model.encoder.layers[0].self_attn
    attention.k_proj = attention.q_proj
    return model


def one_layer_in_two_modules() -> nn.Module:
    model = MARIAN.make()
    model.model.decoder.layers[0].self_attn.v_proj = model.model.encoder.layers[0].self_attn.v_proj
    return model


def one_bias_in_two_modules() -> nn.Module:
    model = MARIAN.make()
    model.model.decoder.layers[0].self_attn.out_proj.bias = model.model.encoder.layers[0].self_attn.out_proj.bias
    return model


def layer_of_another_module() -> nn.Module:
    model = MARIAN.make()
    model.model.encoder.layers[0].fc3 = model.model.encoder.layers[0].self_attn.v_proj
    return model


TIED = [
    tied,
    one_layer_twice,
    one_layer_in_two_modules,
    one_bias_in_two_modules,
    layer_of_another_module,
]


def patched() -> nn.Module:
    model = BERT.make()
    attention = model.encoder.layer[0].attention
    attention.forward = attention.forward
    return model


def patched_inside(path: str) -> nn.Module:
    model = BERT.make()
    module = model.encoder.layer[0].attention.get_submodule(path)
    module.forward = module.forward
    return model


def subclassed_linear() -> nn.Module:
    class Named(nn.Linear):
        def __init__(self, name: str) -> None:
            super().__init__(24, 24, dtype=torch.float64)
            self.name = name

    model = BERT.make()
    model.encoder.layer[0].attention.self.query = Named("query")
    return model


def subclassed() -> nn.Module:
    class Mine(nn.MultiheadAttention):
        pass

    return nn.Sequential(Mine(8, 2))


def not_finite() -> nn.Module:
    model = MARIAN.make()
    with torch.no_grad():
        model.model.decoder.layers[0].encoder_attn.v_proj.weight[3, 3] = float("nan")
    return model


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (BERT.make, {"rank_scale": 0.05}, "leaves a head of 'encoder.layer.0.attention' without dimensions: it has 8"),
        (BERT.make, {"rank_scale": 0.0625}, "so ask for 0.125 or more"),
        (BERT.make, {"rank_scale": 0}, r"rank_scale must be in \(0, 1\]"),
        (BERT.make, {"rank_scale": 1.5}, r"rank_scale must be in \(0, 1\]"),
        (BERT.make, {"rank_scale": float("nan")}, r"rank_scale must be in \(0, 1\]"),
        (BERT.make, {"rank_scale": True}, r"rank_scale must be in \(0, 1\]"),
        (BERT.make, {"rank_scale": {"qk": 0.5}}, "rank_scale must name each of forms"),
        (BERT.make, {"forms": ("vo",)}, 'forms must be a list of "qk" and "ov"'),
        (BERT.make, {"forms": "qk"}, 'forms must be a list of "qk" and "ov"'),
        (BERT.make, {"forms": 3}, 'forms must be a list of "qk" and "ov"'),
        (BERT.make, {"forms": [["qk"]]}, 'forms must be a list of "qk" and "ov"'),
        (BERT.make, {"forms": ()}, 'forms must be a list of "qk" and "ov"'),
        (BERT.make, {"init": "best"}, "init must be one of"),
        (LLAMA.make, {}, r'rotary embeddings rotate queries and keys.*use forms=\("ov",\)'),
        (LLAMA.make, {"forms": ["qk"]}, "rotary embeddings"),
        (hooked, {}, "its projections have hooks"),
        (hooked_backwards, {}, "its projections have hooks"),
        (hooked_gradient, {}, "of its projections, its weight has a gradient hook"),
        (quantized, {}, "of its projections, its weight is float8_e4m3fn"),
        (tied, {}, "its weights are tied"),
        (patched, {}, "its forward was replaced"),
        (lambda: patched_inside("self"), {}, "the forward of self was replaced"),
        (lambda: patched_inside("self.query"), {}, "the forward of self.query was replaced"),
        (lambda: patched_inside("output.dense"), {}, "the forward of output.dense was replaced"),
        (subclassed_linear, {}, "self.query is Named, and a plain Linear in its place would lose what it adds"),
        (subclassed, {}, "Mine is not MultiheadAttention itself"),
        (not_finite, {}, "decoder.layers.0.encoder_attn: attention weights hold NaN"),
        (lambda: fz.factorize_attention(BERT.make()), {}, "already factorized"),
    ],
)
def test_wrong_input_is_refused_and_the_model_stays_as_it_was(make: Any, arguments: Any, message: str) -> None:
    model = make()
    modules, before = list(model.modules()), deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        fz.factorize_attention(model, **arguments)
    assert list(model.modules()) == modules
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", TIED)
@pytest.mark.parametrize("call", [fz.factorize_attention, fz.spectral_init_attention])
def test_projections_that_are_something_else_as_well_are_refused(make: Any, call: Any) -> None:
    model = make()
    modules, before = list(model.modules()), deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"self_attn: its weights are tied: .* are one parameter\. Nothing was changed"
    ):
        call(model)
    assert list(model.modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_attention_module_at_two_places_shares_nothing_with_another() -> None:
    module = nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"a": module, "b": nn.ModuleList([module])})
    fz.spectral_init_attention(model)
    fz.factorize_attention(model)
    assert model["a"] is model["b"][0]


def test_asking_to_rebalance_queries_and_keys_under_rotary_embeddings_is_refused() -> None:
    model = LLAMA.make()
    before = deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="rotary embeddings"):
        fz.spectral_init_attention(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
