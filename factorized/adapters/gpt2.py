"""GPT-2: packed projections, in layers that keep their weights transposed."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from factorized.adapters.family import Family
from factorized.adapters.unit import AttentionUnit

SELF = Family(
    query="c_attn",
    key="c_attn",
    value="c_attn",
    output="c_proj",
    heads="config.num_attention_heads",
    head_size="head_dim",
    scale="scaling",
    all_heads="split_size",
)
CROSS = replace(SELF, query="q_attn")


def read_gpt2(module: nn.Module) -> AttentionUnit:
    """Read a GPT-2 attention; between encoder and decoder the query has a layer of its own."""
    return (CROSS if module.is_cross_attention else SELF)(module)
