from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import factorized as fz
from factorized.attention.register import KNOWN, find_attention
from factorized.formats.frobenius import compose
from factorized.testing import error
from tests.attention.attention_zoo import (
    BERT,
    GPT2,
    LLAMA,
    MARIAN,
    OWN,
    Kind,
    OwnAttention,
    Torch,
    bert,
    every_kind,
    register_own,
)
from tests.attention.explicit import explicit_heads

pytestmark = pytest.mark.usefixtures("own_attention")


def attention_forms(model: nn.Module) -> dict[str, fz.Form]:
    return {form.name: form for form in fz.forms(model) if form.kind in ("qk", "ov")}


@every_kind
def test_every_attention_module_gives_two_forms_by_name_and_kind(kind: Kind) -> None:
    found = attention_forms(kind.make())
    assert {name: form.kind for name, form in found.items()} == {
        f"{name}.{form}": form for name in kind.attention for form in ("qk", "ov")
    }
    assert all(form.rotary == (kind.rotary and form.kind == "qk") for form in found.values())


@every_kind
def test_its_forms_are_the_products_of_the_explicit_matrices_of_every_head(kind: Kind) -> None:
    model = kind.make()
    found = attention_forms(model)
    for name in kind.attention:
        heads = explicit_heads(model.get_submodule(name))
        qk, ov = (compose(found[f"{name}.{form}"].U, found[f"{name}.{form}"].V).flatten(0, -3) for form in ("qk", "ov"))
        assert len(qk) == len(ov) == len(heads)
        for head, (Q, K, V, out) in enumerate(heads):
            assert error(qk[head], Q @ K.T) < 1e-12
            assert error(ov[head], V @ out.T) < 1e-12


@every_kind
def test_its_factors_are_views_and_no_copies(kind: Kind) -> None:
    for form in attention_forms(kind.make()).values():
        for factor in form.factors:
            assert factor.value.untyped_storage().data_ptr() == factor.parameter.untyped_storage().data_ptr()
            with torch.no_grad():
                factor.value.fill_(7.0)
            assert (factor.parameter == 7.0).sum() >= factor.value.numel()


@every_kind
def test_a_shared_key_or_value_head_is_one_matrix_for_its_whole_group(kind: Kind) -> None:
    for form in attention_forms(kind.make()).values():
        U, V = form.U.shape, form.V.shape
        shared = U if form.kind == "ov" else V
        assert (len(U) == 4 and shared[1] == 1 and max(U[1], V[1]) == kind.groups) if kind.groups > 1 else len(U) == 3


def test_every_class_in_the_table_exists_under_that_name() -> None:
    import importlib

    for qualified in KNOWN:
        module, _, name = qualified.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), nn.Module)


def test_a_subclass_is_read_like_its_parent() -> None:
    class Mine(nn.MultiheadAttention):
        pass

    assert [form.name for form in fz.forms(nn.Sequential(Mine(8, 2)))] == ["0.qk", "0.ov"]


def test_attention_inside_a_block_is_found_once_and_its_block_is_no_attention() -> None:
    class AttentionBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    assert [read.name for read in find_attention(nn.Sequential(AttentionBlock()))] == ["0.attn"]


def test_a_module_at_two_places_gives_its_forms_once() -> None:
    module = nn.MultiheadAttention(8, 2)
    assert len(fz.forms(nn.ModuleList([module, module]))) == 2


def test_a_model_without_attention_says_so() -> None:
    with pytest.raises(ValueError, match="Linear holds no attention"):
        fz.factorize_attention(nn.Linear(4, 4))


def test_what_is_registered_must_be_a_module_class() -> None:
    with pytest.raises(ValueError, match=r"cls must be a subclass of nn\.Module"):
        fz.register_attention(OwnAttention(), query="a", key="b", value="c", output="d", heads="h")  # type: ignore[arg-type]


def pruned_bert() -> nn.Module:
    model = BERT.make()
    inner = model.encoder.layer[0].attention.self
    for name in ("query", "key", "value"):
        setattr(inner, name, nn.Linear(24, 16, dtype=torch.float64))
    inner.num_attention_heads = 2
    return model


def pruned_marian() -> nn.Module:
    model = MARIAN.make()
    module = model.model.encoder.layers[0].self_attn
    module.num_heads = 2
    module.q_proj, module.k_proj, module.v_proj = (nn.Linear(24, 16, dtype=torch.float64) for _ in range(3))
    module.out_proj = nn.Linear(16, 24, dtype=torch.float64)
    return model


def pruned_llama() -> nn.Module:
    model = LLAMA.make()
    model.model.layers[0].self_attn.q_proj = nn.Linear(24, 24, dtype=torch.float64)
    return model


def marked() -> nn.Module:
    model = BERT.make()
    model.encoder.layer[0].attention.pruned_heads = {1}
    return model


def masked() -> nn.Module:
    model = Torch()
    prune.random_unstructured(model.attn, "in_proj_weight", 0.5)
    return model


def masked_bert() -> nn.Module:
    model = BERT.make()
    prune.random_unstructured(model.encoder.layer[0].attention.self.key, "weight", 0.5)
    return model


def wrong_layer() -> nn.Module:
    model = BERT.make()
    model.encoder.layer[0].attention.self.query = fz.FactorizedLinear(24, 24, 3, dtype=torch.float64)
    return model


def integers() -> nn.Module:
    model = MARIAN.make()
    layer = model.model.encoder.layers[0].self_attn.k_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    return model


def masked_bias() -> nn.Module:
    model = BERT.make()
    prune.random_unstructured(model.encoder.layer[0].attention.self.value, "bias", 0.5)
    return model


def masked_biases(name: str) -> nn.Module:
    model = Torch()
    owner, _, key = name.rpartition(".")
    prune.random_unstructured(model.attn.get_submodule(owner), key, 0.5)
    return model


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def own_forward() -> nn.Module:
    model = BERT.make()
    model.encoder.layer[0].attention.self.query = Doubling(24, 24, dtype=torch.float64)
    return model


BROKEN = [
    (masked_bias, "self.value.bias is computed by another rule"),
    (lambda: masked_biases("in_proj_bias"), "in_proj_bias is computed by another rule"),
    (lambda: masked_biases("out_proj.bias"), "out_proj.bias is computed by another rule"),
    (own_forward, "self.query is Doubling, whose forward is not that of Linear"),
    (pruned_bert, "heads were pruned"),
    (pruned_marian, "heads were pruned"),
    (pruned_llama, "heads were pruned"),
    (marked, r"heads \[1\] were pruned"),
    (masked, "in_proj_weight is computed by another rule"),
    (masked_bert, "self.key is Linear, whose weight is not a plain parameter"),
    (wrong_layer, "self.query is already factorized as a layer"),
    (integers, "the weight of k_proj is int8"),
    (lambda: Torch(add_bias_kv=True), "add_bias_kv=True appends a learned key and value"),
]


@pytest.mark.parametrize("call", [fz.factorize_attention, fz.spectral_init_attention])
@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_what_cannot_be_read_says_why_and_stays_as_it_was(make: Any, message: str, call: Any) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = list(model.modules())
    with pytest.raises(ValueError, match=message):
        call(model)
    assert list(model.modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_what_cannot_be_read_is_left_out_of_the_forms_and_explained_in_the_plan(make: Any, message: str) -> None:
    model = nn.Sequential(make(), nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    reasons = {entry.name: entry.reason or "" for entry in fz.plan(model, rank=2, attention="heads").skipped}
    (broken,) = (name for name, reason in reasons.items() if "its heads cannot be shrunk" in reason)
    assert re.search(message, reasons[broken])
    names = [form.name for form in fz.forms(model)]
    assert not {f"{broken}.qk", f"{broken}.ov"}.intersection(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": "number"}, "it has no number"),
        ({"query": "q"}, "it has no q"),
        ({"scale": "scaling"}, "it has no scaling"),
        ({"heads": "qkv"}, "not a number of heads"),
    ],
)
def test_a_wrong_registration_says_what_is_not_there(change: dict[str, str], message: str) -> None:
    names = {"query": "qkv", "key": "qkv", "value": "qkv", "output": "proj", "heads": "heads", **change}
    fz.register_attention(OwnAttention, **names)
    with pytest.raises(ValueError, match=message):
        fz.factorize_attention(OWN.build())


def test_registering_again_replaces_what_was_said() -> None:
    fz.register_attention(OwnAttention, query="a", key="b", value="c", output="d", heads="heads")
    register_own()
    assert len(fz.forms(OWN.build())) == 2


def test_gpt2s_transposed_layers_are_read_by_columns() -> None:
    form = attention_forms(GPT2.make())["transformer.h.0.attn.ov"]
    assert form.left.projection is not None
    assert form.right.projection is not None
    assert (form.left.projection.dim, form.right.projection.dim) == (1, 0)


def test_grouped_heads_that_do_not_divide_are_refused() -> None:
    model = bert()
    model.encoder.layer[0].attention.self.config.num_attention_heads = 5
    with pytest.raises(ValueError, match="heads were pruned, or its adapter does not fit"):
        fz.factorize_attention(model)
