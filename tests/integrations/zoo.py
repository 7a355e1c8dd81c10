"""Tiny models of transformers: one per architecture, made on the spot from a config, and the inputs they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.integrations.sizes import (
    BART,
    BERT,
    CONVNEXT,
    EXPERTS,
    GPT2,
    LLAMA,
    PYRAMID,
    RESNET,
    SERIES,
    SMALL,
    SPEECH,
    SWIN,
    T5,
    VIT,
    VOCABULARY,
)

# Classes that compute a part in float32, whatever type their weights have.
PARTLY_FLOAT32 = {
    "DebertaForMaskedLM",
    "RecurrentGemmaForCausalLM",
    "SwitchTransformersForConditionalGeneration",
}
Inputs = dict[str, Tensor]


def _tokens(length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def _noise(*extents: int) -> Tensor:
    return torch.randn(extents, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _boxes(length: int = 12) -> Tensor:
    corners = torch.randint(0, 20, (2, length, 2), generator=torch.Generator().manual_seed(2))
    return torch.cat([corners, corners + 10], -1)


INPUTS: dict[str, Callable[[], Inputs]] = {
    "text": lambda: {"input_ids": _tokens()},
    "long text": lambda: {"input_ids": _tokens(32)},
    "text to text": lambda: {"input_ids": _tokens(), "decoder_input_ids": _tokens(9)},
    "long text to text": lambda: {"input_ids": _tokens(32), "decoder_input_ids": _tokens(9)},
    "image": lambda: {"pixel_values": _noise(2, 3, 32, 32)},
    "large image": lambda: {"pixel_values": _noise(2, 3, 64, 64)},
    "image and text": lambda: {"pixel_values": _noise(2, 3, 32, 32), "input_ids": _tokens()},
    "sound": lambda: {"input_values": _noise(2, 400)},
    "spectrogram to text": lambda: {"input_features": _noise(2, 8, 40), "decoder_input_ids": _tokens(9)},
    "spectrogram": lambda: {"input_values": _noise(2, 64, 16)},
    "page": lambda: {"input_ids": _tokens(), "bbox": _boxes()},
    "page of an image": lambda: {"input_ids": _tokens(), "bbox": _boxes(), "pixel_values": _noise(2, 3, 32, 32)},
    "bytes": lambda: {"inputs": _tokens()},
    "video": lambda: {"pixel_values": _noise(1, 4, 3, 32, 32)},
    "series": lambda: {"past_values": _noise(2, 32, 3)},
}


@dataclass(frozen=True)
class Tiny:
    """One class of transformers at its smallest, and what it takes."""

    name: str
    takes: str
    settings: Mapping[str, Any]  # of its config

    def __str__(self) -> str:
        return self.name

    @property
    def tolerance(self) -> float:
        """The relative error that rounding leaves in float64."""
        return 1e-6 if self.name in PARTLY_FLOAT32 else 1e-8

    def build(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return the model in evaluation mode, always with the same weights."""
        cls = getattr(transformers, self.name)
        torch.manual_seed(0)
        return cls(cls.config_class(**deepcopy(dict(self.settings)))).to(dtype).eval()

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """Return the arguments of its forward."""
        made = INPUTS[self.takes]()
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


def _model(name: str, takes: str, base: Mapping[str, Any] | None = None, /, **own: Any) -> Tiny:
    return Tiny(name, takes, {**(base or {}), **own})


MODELS = [
    _model("BertForMaskedLM", "text", BERT),
    _model("RobertaForMaskedLM", "text", BERT),
    _model("XLMRobertaForMaskedLM", "text", BERT),
    _model("CamembertForMaskedLM", "text", BERT),
    _model("RobertaPreLayerNormForMaskedLM", "text", BERT),
    _model("DebertaForMaskedLM", "text", BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _model("DebertaV2ForMaskedLM", "text", BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _model("ElectraForMaskedLM", "text", BERT, embedding_size=24),
    _model("AlbertForMaskedLM", "text", BERT, embedding_size=24),
    _model(
        "DistilBertForMaskedLM",
        "text",
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    _model("MPNetForMaskedLM", "text", BERT),
    _model("MobileBertForMaskedLM", "text", BERT, embedding_size=32, intra_bottleneck_size=16, intermediate_size=32),
    _model("SqueezeBertForMaskedLM", "text", BERT, embedding_size=32),
    _model("RemBertForMaskedLM", "text", BERT, input_embedding_size=24, output_embedding_size=28),
    _model("RoFormerForMaskedLM", "text", BERT, embedding_size=24),
    _model("ErnieForMaskedLM", "text", BERT),
    _model("MegatronBertForMaskedLM", "text", BERT),
    _model("ConvBertForMaskedLM", "text", BERT, embedding_size=32),
    _model("NystromformerForMaskedLM", "text", BERT, num_landmarks=4, segment_means_seq_len=12),
    _model("FNetForMaskedLM", "text", BERT),
    _model("EsmForMaskedLM", "text", BERT, mask_token_id=3),
    _model("ModernBertForMaskedLM", "text", SMALL, cls_token_id=1, sep_token_id=2),
    _model("IBertForMaskedLM", "text", BERT),
    _model("LukeForMaskedLM", "text", BERT, entity_vocab_size=8, entity_emb_size=16),
    _model("XmodForMaskedLM", "text", BERT, languages=("en_XX",), default_language="en_XX"),
    _model("LongformerForMaskedLM", "long text", BERT, attention_window=8),
    _model("BigBirdForMaskedLM", "long text", BERT, block_size=4, attention_type="original_full"),
    _model(
        "FunnelForMaskedLM",
        "text",
        vocab_size=VOCABULARY,
        d_model=32,
        block_sizes=[1, 1],
        n_head=4,
        d_head=8,
        d_inner=48,
        num_decoder_layers=1,
    ),
    _model("XLNetLMHeadModel", "text", vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=48, dropout=0.0),
    _model(
        "XLMWithLMHeadModel",
        "text",
        vocab_size=VOCABULARY,
        emb_dim=32,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    _model(
        "ReformerModelWithLMHead",
        "long text",
        SMALL,
        attention_head_size=8,
        attn_layers=["local", "local"],
        axial_pos_embds=False,
        feed_forward_size=48,
        local_attn_chunk_length=8,
        is_decoder=True,
    ),
    _model(
        "PerceiverForMaskedLM",
        "bytes",
        vocab_size=VOCABULARY,
        d_model=32,
        d_latents=24,
        num_latents=8,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=16,
        v_channels=24,
        max_position_embeddings=12,
    ),
    _model("GPT2LMHeadModel", "text", GPT2),
    _model("OpenAIGPTLMHeadModel", "text", GPT2),
    _model(
        "GPTNeoForCausalLM",
        "text",
        SMALL,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    _model("GPTNeoXForCausalLM", "text", SMALL),
    _model("GPTJForCausalLM", "text", GPT2, rotary_dim=4),
    _model("CodeGenForCausalLM", "text", GPT2, n_ctx=64, rotary_dim=4),
    _model("GPTBigCodeForCausalLM", "text", GPT2),
    _model("OPTForCausalLM", "text", SMALL, ffn_dim=48, word_embed_proj_dim=24, dropout=0.0),
    _model("BloomForCausalLM", "text", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    _model("BioGptForCausalLM", "text", BERT),
    _model("CTRLLMHeadModel", "text", GPT2, dff=48),
    _model("MptForCausalLM", "text", vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    _model("FalconForCausalLM", "text", SMALL, ffn_hidden_size=48),
    _model("LlamaForCausalLM", "text", LLAMA),
    _model("MistralForCausalLM", "text", LLAMA),
    _model("MixtralForCausalLM", "text", EXPERTS, num_local_experts=4),
    _model("Qwen2ForCausalLM", "text", LLAMA, tie_word_embeddings=True),
    _model(
        "Qwen2MoeForCausalLM",
        "text",
        EXPERTS,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    _model("Qwen3ForCausalLM", "text", LLAMA),
    _model("Qwen3MoeForCausalLM", "text", EXPERTS, num_experts=4, moe_intermediate_size=24),
    _model("GemmaForCausalLM", "text", LLAMA),
    _model("Gemma2ForCausalLM", "text", LLAMA),
    _model("Gemma3ForCausalLM", "text", LLAMA),
    _model("PhiForCausalLM", "text", SMALL, num_key_value_heads=2),
    _model("Phi3ForCausalLM", "text", SMALL, num_key_value_heads=2),
    _model("StableLmForCausalLM", "text", SMALL, num_key_value_heads=2),
    _model("OlmoForCausalLM", "text", LLAMA),
    _model("Olmo2ForCausalLM", "text", LLAMA),
    _model("OlmoeForCausalLM", "text", EXPERTS, num_experts=4),
    _model("CohereForCausalLM", "text", SMALL, num_key_value_heads=2),
    _model("Cohere2ForCausalLM", "text", SMALL, num_key_value_heads=2),
    _model("GraniteForCausalLM", "text", LLAMA),
    _model("GlmForCausalLM", "text", LLAMA),
    _model("NemotronForCausalLM", "text", LLAMA),
    _model("Starcoder2ForCausalLM", "text", SMALL, num_key_value_heads=2),
    _model("SmolLM3ForCausalLM", "text", LLAMA),
    _model("HeliumForCausalLM", "text", LLAMA),
    _model("GptOssForCausalLM", "text", EXPERTS, num_local_experts=4),
    _model(
        "DeepseekV3ForCausalLM",
        "text",
        SMALL,
        experts_implementation="eager",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
    _model(
        "MambaForCausalLM",
        "text",
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _model(
        "Mamba2ForCausalLM",
        "text",
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=8,
    ),
    _model(
        "RwkvForCausalLM",
        "text",
        vocab_size=VOCABULARY,
        context_length=64,
        hidden_size=32,
        num_hidden_layers=2,
        rescale_every=0,
    ),
    _model(
        "RecurrentGemmaForCausalLM",
        "text",
        SMALL,
        num_key_value_heads=1,
        lru_width=32,
        attention_window_size=16,
        num_hidden_layers=3,
    ),
    _model("T5ForConditionalGeneration", "text to text", T5),
    _model("MT5ForConditionalGeneration", "text to text", T5, feed_forward_proj="gated-gelu"),
    _model("UMT5ForConditionalGeneration", "text to text", T5, feed_forward_proj="gated-gelu"),
    _model("LongT5ForConditionalGeneration", "long text to text", T5, local_radius=7, encoder_attention_type="local"),
    _model(
        "SwitchTransformersForConditionalGeneration",
        "text to text",
        T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=16,
    ),
    _model("BartForConditionalGeneration", "text to text", BART),
    _model("MBartForConditionalGeneration", "text to text", BART),
    _model("MarianMTModel", "text to text", BART),
    _model("PegasusForConditionalGeneration", "text to text", BART),
    _model("M2M100ForConditionalGeneration", "text to text", BART, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    _model("BlenderbotForConditionalGeneration", "text to text", BART),
    _model("PLBartForConditionalGeneration", "text to text", BART),
    _model(
        "LEDForConditionalGeneration",
        "long text to text",
        BART,
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    _model(
        "FSMTForConditionalGeneration",
        "text to text",
        BART,
        langs=["en", "de"],
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
    ),
    _model(
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
    _model(
        "WhisperForConditionalGeneration",
        "spectrogram to text",
        BART,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
    ),
    _model("Wav2Vec2ForCTC", "sound", SPEECH),
    _model("HubertForCTC", "sound", SPEECH),
    _model("WavLMForCTC", "sound", SPEECH),
    _model("UniSpeechForCTC", "sound", SPEECH),
    _model("SEWForCTC", "sound", SPEECH),
    _model("ASTForAudioClassification", "spectrogram", VIT, patch_size=4, num_mel_bins=16, max_length=64),
    _model("ViTForImageClassification", "image", VIT),
    _model("DeiTForImageClassification", "image", VIT),
    _model("BeitForImageClassification", "image", VIT, use_relative_position_bias=True),
    _model("Data2VecVisionForImageClassification", "image", VIT),
    _model("ViTMSNForImageClassification", "image", VIT),
    _model("Dinov2ForImageClassification", "image", VIT, mlp_ratio=2),
    _model("YolosForObjectDetection", "image", VIT, image_size=[32, 32], num_detection_tokens=4),
    _model("VideoMAEForVideoClassification", "video", VIT, num_frames=4, tubelet_size=2),
    _model("TimesformerForVideoClassification", "video", VIT, num_frames=4),
    _model("SwinForImageClassification", "image", SWIN),
    _model("Swinv2ForImageClassification", "image", SWIN),
    _model("ConvNextForImageClassification", "image", CONVNEXT),
    _model("ConvNextV2ForImageClassification", "image", CONVNEXT),
    _model("ResNetForImageClassification", "image", RESNET),
    _model("RegNetForImageClassification", "image", RESNET, groups_width=8),
    _model("BitForImageClassification", "image", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4),
    _model("MobileNetV1ForImageClassification", "large image", depth_multiplier=0.25, image_size=64, min_depth=8),
    _model("MobileNetV2ForImageClassification", "large image", depth_multiplier=0.25, image_size=64, min_depth=8),
    _model(
        "MobileViTForImageClassification",
        "large image",
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
        num_attention_heads=4,
        patch_size=2,
    ),
    _model("MobileViTV2ForImageClassification", "large image", image_size=64, width_multiplier=0.25),
    _model("SegformerForSemanticSegmentation", "large image", PYRAMID, decoder_hidden_size=16),
    _model("PvtForImageClassification", "large image", PYRAMID, image_size=64),
    _model("PoolFormerForImageClassification", "large image", hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1]),
    _model(
        "LevitForImageClassification",
        "large image",
        image_size=64,
        hidden_sizes=[16, 32, 48],
        num_attention_heads=[2, 2, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        drop_path_rate=0,
    ),
    _model(
        "FocalNetForImageClassification",
        "image",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        focal_levels=[1, 1],
        focal_windows=[3, 3],
        drop_path_rate=0.0,
    ),
    _model(
        "HieraForImageClassification",
        "image",
        image_size=[32, 32],
        patch_size=[3, 3],
        patch_stride=[2, 2],
        patch_padding=[1, 1],
        embed_dim=16,
        depths=[1, 1],
        num_heads=[1, 2],
        embed_dim_multiplier=2.0,
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        num_query_pool=1,
    ),
    _model("GLPNForDepthEstimation", "large image", PYRAMID, decoder_hidden_size=16),
    _model("ImageGPTForImageClassification", "text", GPT2),
    _model("CLIPModel", "image and text", text_config=SMALL, vision_config=VIT, projection_dim=16),
    _model("SiglipModel", "image and text", text_config=SMALL, vision_config=VIT),
    _model("ChineseCLIPModel", "image and text", text_config=BERT, vision_config=VIT, projection_dim=16),
    _model("CLIPSegModel", "image and text", text_config=SMALL, vision_config=VIT, projection_dim=16),
    _model(
        "BlipModel",
        "image and text",
        text_config={**SMALL, "encoder_hidden_size": 32, "projection_dim": 16},
        vision_config={**VIT, "projection_dim": 16},
        projection_dim=16,
    ),
    _model("ViltForQuestionAnswering", "image and text", {**VIT, **BERT}),
    _model("GitForCausalLM", "image and text", BERT, vision_config=VIT),
    _model("LayoutLMForMaskedLM", "page", BERT, max_2d_position_embeddings=64),
    _model(
        "LayoutLMv3ForTokenClassification",
        "page of an image",
        BERT,
        max_2d_position_embeddings=64,
        coordinate_size=6,
        shape_size=4,
        input_size=32,
        patch_size=8,
    ),
    _model(
        "LiltForTokenClassification",
        "page",
        BERT,
        hidden_size=48,
        max_2d_position_embeddings=64,
        channel_shrink_ratio=2,
    ),
    _model("BrosForTokenClassification", "page", BERT, dim_bbox=4),
    _model(
        "PatchTSTForPrediction", "series", SERIES, d_model=32, num_attention_heads=4, ffn_dim=48, num_hidden_layers=2
    ),
    _model("PatchTSMixerForPrediction", "series", SERIES, d_model=16, num_layers=2),
    _model(
        "DetrForObjectDetection",
        "large image",
        backbone_config=transformers.ResNetConfig(**RESNET, out_features=["stage2"]),
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_queries=5,
        use_timm_backbone=False,
        backbone=None,
    ),
]
