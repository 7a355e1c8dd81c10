"""Attention whose projections are factorized like any other layer, in models of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from tests.attention.attention_zoo import BERT, GPT2, HUGGING_FACE, LLAMA, MARIAN, VOCABULARY, Kind, translated


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=3, pad_token_id=0)
    )


T5_NAMES = ("encoder.block.0.layer.0.Self", "decoder.block.0.layer.0.Self", "decoder.block.0.layer.1.EncDec")
T5 = Kind("t5", t5, translated, tuple(f"{name}Attention" for name in T5_NAMES))  # a class that nobody registered
VIT = next(kind for kind in HUGGING_FACE if kind.name == "vit")
PROJECTIONS = {
    "bert": ("self.query", "self.key", "self.value", "output.dense"),
    "marian": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "vit": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "t5": ("q", "k", "v", "o"),
}
KINDS = [BERT, MARIAN, GPT2, LLAMA, VIT, T5]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def projections(kind: Kind) -> set[str]:
    return {f"{attention}.{layer}" for attention in kind.attention for layer in PROJECTIONS[kind.name]}


@every_kind
def test_by_default_every_projection_is_a_layer(kind: Kind) -> None:
    model = kind.make()
    plan = fz.plan(model, rank=2)
    assert plan == fz.plan(model, rank=2, attention="layers")
    assert projections(kind) <= {entry.name for entry in plan.selected}
    assert not any(entry.is_attention for entry in plan.entries)


@every_kind
@torch.no_grad()
def test_at_full_rank_the_model_computes_what_it_did(kind: Kind) -> None:
    model = kind.make()
    expected = kind.run(model)
    fz.factorize(model, fz.Overcomplete(), rank_scale=1.0, init="spectral")
    assert all(isinstance(model.get_submodule(name), fz.FactorizedLinear) for name in projections(kind))
    assert (kind.run(model) - expected).abs().max() < 1e-9


@every_kind
def test_each_projection_is_one_form_and_attention_claims_none(kind: Kind) -> None:
    model = fz.factorize(kind.make(), rank=2)
    forms = {form.name: form.kind for form in fz.forms(model)}
    assert {forms[name] for name in projections(kind)} == {"linear"}
    assert not {"qk", "ov"}.intersection(forms.values())
    factors = [factor.parameter for form in fz.forms(model) for factor in form.factors]
    assert len(factors) == len(set(factors))
    decay = fz.FrobeniusDecay(model, 0.1)
    expected = torch.stack([model.get_submodule(name).weight.square().sum() for name in forms]).sum()
    assert decay.penalty().item() == pytest.approx(0.05 * expected.item())


def test_attention_with_one_factorized_projection_has_no_forms_left_and_says_why() -> None:
    model = fz.factorize(LLAMA.make(), rank=2, include=["*q_proj"])
    assert {form.kind for form in fz.forms(model)} == {"linear"}
    with pytest.raises(ValueError, match="q_proj is factorized as a layer of its own"):
        fz.FrobeniusDecay(model, {"ov": 0.1})
    again = fz.plan(model, rank=2, attention="heads")
    assert "q_proj is factorized as a layer of its own" in str([entry.reason for entry in again.skipped])


@every_kind
@torch.no_grad()
def test_composing_lowering_and_files_round_trip(kind: Kind, tmp_path: Path) -> None:
    model = fz.factorize(kind.make(), rank=3, include=list(kind.attention))
    expected = kind.run(model)
    dense = fz.compose(model)
    assert (kind.run(dense) - expected).abs().max() < 1e-10
    assert (kind.run(fz.lower(model)) - expected).abs().max() < 1e-10
    assert all(type(dense.get_submodule(name)) is not fz.FactorizedLinear for name in projections(kind))
    fz.save(model, tmp_path / "out")
    assert torch.equal(kind.run(fz.load(tmp_path / "out", kind.make())), expected)


@pytest.mark.parametrize("attention", [None, "layers", "heads", False])
@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("*q_proj", ["q_proj"]),
        ("model.layers.0.self_attn.q_proj", ["q_proj"]),
        ("*.self_attn.[kv]_proj", ["k_proj", "v_proj"]),
    ],
)
def test_a_projection_that_include_names_is_factorized_as_a_layer(
    pattern: str, selected: list[str], attention: Any
) -> None:
    plan = fz.plan(LLAMA.make(), rank=2, include=[pattern], attention=attention)
    assert [entry.name.rpartition(".")[2] for entry in plan.selected] == selected


def llama_attention() -> type[nn.Module]:
    from transformers.models.llama.modeling_llama import LlamaAttention

    return LlamaAttention


@pytest.mark.parametrize("pattern", ["model.layers.0.self_attn", "*self_attn", "*attn", llama_attention()])
def test_globs_containers_and_types_name_whole_attention(pattern: Any) -> None:
    heads = fz.plan(LLAMA.make(), rank=2, include=[pattern], attention="heads")
    assert [entry.name for entry in heads.selected] == ["model.layers.0.self_attn"]
    layers = fz.plan(LLAMA.make(), rank=2, include=[pattern])
    assert [entry.name.rpartition(".")[2] for entry in layers.selected] == list(PROJECTIONS["llama"])
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn: attention=False leaves attention as it is"):
        fz.plan(LLAMA.make(), rank=2, include=[pattern], attention=False)


def test_an_excluded_projection_keeps_its_weight_and_its_heads() -> None:
    layers = fz.plan(LLAMA.make(), rank=2, exclude=["*q_proj"])
    reasons = {entry.name: entry.reason for entry in layers.entries}
    assert reasons["model.layers.0.self_attn.q_proj"] == "in exclude="
    assert reasons["model.layers.0.self_attn.k_proj"] is None
    heads = fz.plan(LLAMA.make(), rank=2, exclude=["*q_proj"], attention="heads")
    assert {entry.name: entry.reason for entry in heads.entries}["model.layers.0.self_attn"] == "in exclude="


def test_a_budget_is_spent_over_mlps_and_attention_and_not_over_embeddings() -> None:
    model = LLAMA.make()
    plan = fz.plan(model, ratio=0.8)
    dense = {entry.name: entry.reason or "" for entry in plan.skipped}
    assert set(dense) == {"model.embed_tokens", "lm_head"}
    assert all("keep_first_and_last" in reason for reason in dense.values())
    fz.factorize(model, plan)
    assert sum(p.numel() for p in model.parameters()) == plan.params_after <= 0.8 * plan.params
