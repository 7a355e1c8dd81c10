"""Tiny models of sound, of pages, of images with text, and of time series."""

from __future__ import annotations

from tests.integrations.zoo.sizes import BART, BERT, SERIES, SMALL, SPEECH, VIT
from tests.integrations.zoo.tiny import tiny

MODELS = [
    tiny(
        "WhisperForConditionalGeneration",
        "spectrogram to text",
        BART,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
    ),
    tiny("Wav2Vec2ForCTC", "sound", SPEECH),
    tiny("HubertForCTC", "sound", SPEECH),
    tiny("WavLMForCTC", "sound", SPEECH),
    tiny("UniSpeechForCTC", "sound", SPEECH),
    tiny("SEWForCTC", "sound", SPEECH),
    tiny("ASTForAudioClassification", "spectrogram", VIT, patch_size=4, num_mel_bins=16, max_length=64),
    tiny("CLIPModel", "image and text", text_config=SMALL, vision_config=VIT, projection_dim=16),
    tiny("SiglipModel", "image and text", text_config=SMALL, vision_config=VIT),
    tiny("ChineseCLIPModel", "image and text", text_config=BERT, vision_config=VIT, projection_dim=16),
    tiny("CLIPSegModel", "image and text", text_config=SMALL, vision_config=VIT, projection_dim=16),
    tiny(
        "BlipModel",
        "image and text",
        text_config={**SMALL, "encoder_hidden_size": 32, "projection_dim": 16},
        vision_config={**VIT, "projection_dim": 16},
        projection_dim=16,
    ),
    tiny("ViltForQuestionAnswering", "image and text", {**VIT, **BERT}),
    tiny("GitForCausalLM", "image and text", BERT, vision_config=VIT),
    tiny("LayoutLMForMaskedLM", "page", BERT, max_2d_position_embeddings=64),
    tiny(
        "LayoutLMv3ForTokenClassification",
        "page of an image",
        BERT,
        max_2d_position_embeddings=64,
        coordinate_size=6,
        shape_size=4,
        input_size=32,
        patch_size=8,
    ),
    tiny(
        "LiltForTokenClassification",
        "page",
        BERT,
        hidden_size=48,
        max_2d_position_embeddings=64,
        channel_shrink_ratio=2,
    ),
    tiny("BrosForTokenClassification", "page", BERT, dim_bbox=4),
    tiny("PatchTSTForPrediction", "series", SERIES, d_model=32, num_attention_heads=4, ffn_dim=48, num_hidden_layers=2),
    tiny("PatchTSMixerForPrediction", "series", SERIES, d_model=16, num_layers=2),
]
