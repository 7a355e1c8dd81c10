"""Llama and Mistral: grouped queries, and rotary embeddings between the queries and the keys."""

from __future__ import annotations

from factorized.adapters.family import Family

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
