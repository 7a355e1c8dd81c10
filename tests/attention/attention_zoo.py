"""Small models with attention of every family, in float64, with biases that are not zero, and how to run them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz

os.environ["HF_HUB_OFFLINE"] = "1"
VOCABULARY = 61


class Torch(nn.Module):
    """An ``nn.MultiheadAttention`` of any settings, fed with one sequence of queries and one of keys."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3, **settings)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flip(0)[:, :5]
        key, value = (F.pad(y, (0, width - 24), value=0.3) for width in (self.attn.kdim, self.attn.vdim))
        first = getattr(self.attn, "batch_first", True)
        query, key, value = (t if first else t.transpose(0, 1) for t in (x, key, value))
        out: Tensor = self.attn(query, key, value, need_weights=False)[0]
        return out if first else out.transpose(0, 1)


class OwnAttention(nn.Module):
    """An attention class that nobody knows: packed, with a scale that it computes itself."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


def register_own() -> None:
    fz.register_attention(
        OwnAttention,
        query="qkv", key="qkv", value="qkv", output="proj",
        heads="heads",
    )  # fmt: skip


SIZES: dict[str, Any] = {  # as BERT's configuration, and those made after it, call them
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
}


def bert(decoder: bool = False, roberta: bool = False) -> nn.Module:
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    settings: dict[str, Any] = {
        **SIZES,
        "is_decoder": decoder,
        "add_cross_attention": decoder,
        "initializer_range": 0.3,
    }
    return RobertaModel(RobertaConfig(**settings)) if roberta else BertModel(BertConfig(**settings))


def marian(bart: bool = False) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 24,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 24,
        "init_std": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": 2,
    }
    return BartForConditionalGeneration(BartConfig(**settings)) if bart else MarianMTModel(MarianConfig(**settings))


def gpt2(cross: bool = False) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_positions=24,
            initializer_range=0.3,
            add_cross_attention=cross,
            scale_attn_by_inverse_layer_idx=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def llama(mistral: bool = False, bias: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "max_position_embeddings": 24,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    if mistral:
        return MistralForCausalLM(MistralConfig(**settings))
    return LlamaForCausalLM(LlamaConfig(attention_bias=bias, **settings))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=3,
            intermediate_size=32,
            image_size=12,
            patch_size=6,
            initializer_range=0.3,
        )
    )


def tokens(length: int = 6) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def of_tokens(model: nn.Module) -> Tensor:
    out = model(tokens())
    return out.logits if "logits" in out else out.last_hidden_state


def with_encoder(model: nn.Module) -> Tensor:
    states = torch.randn(2, 4, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out = model(tokens(), encoder_hidden_states=states)
    return out.logits if "logits" in out else out.last_hidden_state


def translated(model: nn.Module) -> Tensor:
    return model(tokens(), decoder_input_ids=tokens(5).flip(1)).logits


def of_images(model: nn.Module) -> Tensor:
    pixels = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return model(pixels).last_hidden_state


def of_sequences(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(4)))


@dataclass(frozen=True)
class Kind:
    """A model with attention."""

    name: str
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Tensor]
    attention: tuple[str, ...]  # the names of its attention modules
    rotary: bool = False
    groups: int = 1

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Return the model in evaluation mode, no bias and no norm left as it starts."""
        torch.manual_seed(0)
        model = self.build().to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter += 0.3 * torch.randn_like(parameter)
        return model

    @property
    def forms(self) -> tuple[str, ...]:
        return ("ov",) if self.rotary else ("qk", "ov")


TORCH = [
    Kind("torch packed", lambda: Torch(batch_first=True), of_sequences, ("attn",)),
    Kind("torch sequence first", lambda: Torch(), of_sequences, ("attn",)),
    Kind("torch no bias", lambda: Torch(bias=False, batch_first=True), of_sequences, ("attn",)),
    Kind("torch separate", lambda: Torch(kdim=26, vdim=28, batch_first=True), of_sequences, ("attn",)),
    Kind("torch zero attention", lambda: Torch(add_zero_attn=True, batch_first=True), of_sequences, ("attn",)),
]
OWN = Kind("own", lambda: nn.Sequential(OwnAttention()), of_sequences, ("0",))
BERT = Kind("bert", bert, of_tokens, ("encoder.layer.0.attention",))
CROSS = ("encoder.layer.0.attention", "encoder.layer.0.crossattention")
MARIAN_NAMES = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn")
MARIAN = Kind("marian", marian, translated, tuple(f"model.{name}" for name in MARIAN_NAMES))
GPT2 = Kind("gpt2", gpt2, of_tokens, ("transformer.h.0.attn", "transformer.h.1.attn"))
LLAMA = Kind("llama", llama, of_tokens, ("model.layers.0.self_attn",), rotary=True, groups=3)
HUGGING_FACE = [
    BERT,
    Kind("roberta", lambda: bert(roberta=True), of_tokens, ("encoder.layer.0.attention",)),
    Kind("bert with cross attention", lambda: bert(decoder=True), with_encoder, CROSS),
    MARIAN,
    Kind("bart", lambda: marian(bart=True), translated, tuple(f"model.{name}" for name in MARIAN_NAMES)),
    GPT2,
    Kind(
        "gpt2 with cross attention",
        lambda: gpt2(cross=True),
        with_encoder,
        tuple(f"transformer.h.{i}.{name}" for i in (0, 1) for name in ("attn", "crossattention")),
    ),
    LLAMA,
    Kind("mistral", lambda: llama(mistral=True), of_tokens, ("model.layers.0.self_attn",), rotary=True, groups=3),
    Kind("vit", vit, of_images, ("layers.0.attention",)),
]
EVERY = [*TORCH, OWN, *HUGGING_FACE]
every_kind = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
