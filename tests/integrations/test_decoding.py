"""Fused decoder layers compute what transformers' do, dense and lowered, for prompts and for single tokens."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import factorized as fz
from factorized.integrations.decoding import FusedDecoderLayer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
}


def build(config: transformers.PretrainedConfig, ratio: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))  # norms other than one, too
    return model if ratio is None else fz.lower(fz.factorize(model, fz.LowRank(), ratio=ratio))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_decoder_generates_what_the_model_does(name: str) -> None:
    model = build(CONFIGS[name](), 0.6)
    fused = fz.integrations.fuse_decoder(deepcopy(model))
    prompt = torch.randint(0, 100, (2, 12))
    torch.testing.assert_close(fused(prompt).logits, model(prompt).logits)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    assert torch.equal(fused.generate(prompt, **settings), model.generate(prompt, **settings))
    assert sum(isinstance(module, FusedDecoderLayer) for module in fused.modules()) == 3


def test_it_holds_each_weight_once() -> None:
    config = transformers.LlamaConfig(**(SIZES | {"num_key_value_heads": 4}))
    model = fz.lower(fz.factorize(build(config), fz.LowRank(), rank=8))
    before = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in fz.integrations.fuse_decoder(model).parameters()) == before


@pytest.mark.nightly
def test_it_compiles_as_one_graph() -> None:
    model = build(CONFIGS["llama"](), 0.6)
    fused = fz.integrations.fuse_decoder(deepcopy(model))
    caches = [transformers.StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
    run = torch.compile(lambda x: fused(x, past_key_values=caches[1]).logits, fullgraph=True, dynamic=False)
    with torch.device("cpu"):  # a mode, which some methods of tensors cannot be traced in
        for _ in range(3):
            x = torch.randint(0, 100, (2, 1))
            torch.testing.assert_close(run(x), model(x, past_key_values=caches[0]).logits)


def test_layers_that_are_not_all_low_rank_stay_as_they_are() -> None:
    model = build(CONFIGS["llama"]())
    fz.factorize(model, fz.LowRank(), rank=8, exclude=["model.layers.1.self_attn.k_proj"])
    model = fz.lower(model)
    fused = fz.integrations.fuse_decoder(deepcopy(model))
    kinds = [type(layer).__name__ for layer in fused.model.layers]
    assert kinds == ["FusedDecoderLayer", "LlamaDecoderLayer", "FusedDecoderLayer"]
    tokens = torch.randint(0, 100, (1, 5))
    torch.testing.assert_close(fused(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: build(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=100)), "GPT2LMHeadModel has"),
        (lambda: build(transformers.GemmaConfig(**SIZES, head_dim=16), 0.6), "none is of LlamaDecoderLayer, Mistral"),
        (
            lambda: build(transformers.LlamaConfig(**SIZES, attention_bias=True), 0.6),
            "q_proj must be a pair of linears",
        ),
        (
            lambda: build(transformers.LlamaConfig(**SIZES, hidden_act="gelu"), 0.6),
            r"layers\.0\.mlp\.act_fn must be SiLU, got GELU",
        ),
        (lambda: build(CONFIGS["llama"]()), r"q_proj must be a pair .* as fz.lower makes it, got Linear"),
        (lambda: fz.factorize(build(CONFIGS["llama"]()), fz.LowRank(), ratio=0.6), "got FactorizedLinear"),
    ],
)
def test_a_model_without_a_layer_that_can_be_fused_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.integrations.fuse_decoder(model())
