"""ViT: four linears."""

from __future__ import annotations

from factorized.adapters.family import Family

VIT = Family(
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="o_proj",
    heads="config.num_attention_heads",
    head_size="head_dim",
    scale="scaling",
)
