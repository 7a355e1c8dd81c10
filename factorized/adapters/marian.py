"""Marian and BART: four linears, in the encoder, the decoder and between them."""

from __future__ import annotations

from factorized.adapters.family import Family

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
