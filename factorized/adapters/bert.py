"""BERT and RoBERTa: the attention block holds the projections in ``self`` and in ``output``."""

from __future__ import annotations

from factorized.adapters.family import Family

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
