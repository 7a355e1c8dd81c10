"""Where the attention classes of torch and transformers keep their matrices, one adapter per family."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from factorized.attention.family import Family, UnreadableAttention, plain_bias, plain_weight
from factorized.attention.unit import AttentionUnit, Projection

# BERT and RoBERTa: the attention block holds the projections in ``self`` and in ``output``.
BERT = Family(
    query="self.query",
    key="self.key",
    value="self.value",
    output="output.dense",
    heads="self.config.num_attention_heads",
    head_size="self.attention_head_size",
    scale="self.scaling",
    all_heads="self.all_head_size",
)

# Marian and BART: four linears, in the encoder, the decoder and between them.
MARIAN = Family(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="out_proj",
    heads="num_heads",
    head_size="head_dim",
    scale="scaling",
    width="embed_dim",
)

# Llama and Mistral: grouped queries, and rotary embeddings between the queries and the keys.
LLAMA = Family(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="o_proj",
    heads="config.num_attention_heads",
    kv_heads="config.num_key_value_heads",
    head_size="head_dim",
    scale="scaling",
    rotary=True,
)

VIT = Family(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="o_proj",
    heads="config.num_attention_heads",
    head_size="head_dim",
    scale="scaling",
)

# GPT-2: packed projections, in layers that keep their weights transposed.
GPT2_SELF = Family(
    query="c_attn",
    key="c_attn",
    value="c_attn",
    output="c_proj",
    heads="config.num_attention_heads",
    head_size="head_dim",
    scale="scaling",
    all_heads="split_size",
)
GPT2_CROSS = replace(GPT2_SELF, query="q_attn")


def read_gpt2(module: nn.Module) -> AttentionUnit:
    """Read a GPT-2 attention; between encoder and decoder the query has a layer of its own."""
    return (GPT2_CROSS if module.is_cross_attention else GPT2_SELF)(module)


SHRUNK = Family("q_proj", "k_proj", "v_proj", "out_proj", heads="num_heads", one_size=False)


def read_shrunk(module: nn.Module) -> AttentionUnit:
    """Read what a shrunk ``nn.MultiheadAttention`` has become."""
    return replace(SHRUNK(module), sums_to_one=not module.add_zero_attn)


def read_multihead(module: nn.MultiheadAttention) -> AttentionUnit:
    """Read an ``nn.MultiheadAttention``."""
    if module.bias_k is not None or module.bias_v is not None:
        raise UnreadableAttention(
            "add_bias_kv=True appends a learned key and value, which are no product of two matrices"
        )
    heads, size, width = module.num_heads, module.head_dim, module.embed_dim
    packed = module._qkv_same_embed_dim
    bias = plain_bias(module, "in_proj_bias")
    names = ["in_proj_weight"] * 3 if packed else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    inputs = []
    for index, name in enumerate(names):
        weight = module._parameters.get(name)
        if weight is None:
            raise UnreadableAttention(f"{name} is computed by another rule (pruning, a parametrization)")
        start = index * width
        inputs.append(Projection("", weight, bias, heads, size, 0, start if packed else 0, start))
    weight = plain_weight(module.out_proj, "out_proj")
    output = Projection("out_proj", weight, plain_bias(module.out_proj, "out_proj.bias"), heads, size, 1)
    query, key, value = inputs
    return AttentionUnit(
        module,
        query,
        key,
        value,
        output,
        rotary=False,
        head_size=size,
        one_size=False,
        sums_to_one=not module.add_zero_attn,
    )
