"""Transformers of real sizes, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

NAMES = ("llama", "llama-long", "bert", "gpt2", "t5", "vit", "mistral", "qwen2", "mixtral")


@cache
def real_size(name: str) -> nn.Module:
    """Return one of ``NAMES``, without memory for its weights."""
    with torch.device("meta"):
        return _MAKERS[name]()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "vocab_size": 32_000}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=32))


def _llama_long() -> nn.Module:
    """Nearly half of it is its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=16))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig())


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(num_hidden_layers=8))


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=14, num_key_value_heads=2))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))


_MAKERS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama-long": _llama_long,
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "vit": _vit,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "mixtral": _mixtral,
}
