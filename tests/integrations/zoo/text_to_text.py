"""Tiny models with an encoder and a decoder of text."""

from __future__ import annotations

from tests.integrations.zoo.sizes import BART, T5, VOCABULARY
from tests.integrations.zoo.tiny import tiny

MODELS = [
    tiny("T5ForConditionalGeneration", "text to text", T5),
    tiny("MT5ForConditionalGeneration", "text to text", T5, feed_forward_proj="gated-gelu"),
    tiny("UMT5ForConditionalGeneration", "text to text", T5, feed_forward_proj="gated-gelu"),
    tiny("LongT5ForConditionalGeneration", "long text to text", T5, local_radius=7, encoder_attention_type="local"),
    tiny(
        "SwitchTransformersForConditionalGeneration",
        "text to text",
        T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=16,
    ),
    tiny("BartForConditionalGeneration", "text to text", BART),
    tiny("MBartForConditionalGeneration", "text to text", BART),
    tiny("MarianMTModel", "text to text", BART),
    tiny("PegasusForConditionalGeneration", "text to text", BART),
    tiny("M2M100ForConditionalGeneration", "text to text", BART, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    tiny("BlenderbotForConditionalGeneration", "text to text", BART),
    tiny("PLBartForConditionalGeneration", "text to text", BART),
    tiny(
        "LEDForConditionalGeneration",
        "long text to text",
        BART,
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    tiny(
        "FSMTForConditionalGeneration",
        "text to text",
        BART,
        langs=["en", "de"],
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
    ),
    tiny(
        "ProphetNetForConditionalGeneration",
        "text to text",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        decoder_start_token_id=1,
        ngram=2,
        dropout=0.0,
    ),
]
