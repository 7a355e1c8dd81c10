"""Compiled models of transformers attend without masks that are not needed, and with those that are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.fx import GraphModule
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

import factorized as fz
from factorized.integrations.masks import SKIPPING, skip_masks

pytestmark = pytest.mark.filterwarnings("ignore:.*attn_implementation:UserWarning")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
BOTH = ["full_attention", "sliding_attention"]
GPT2 = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
FALCON = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
MARIAN = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "use_cache": False},
    **{"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None},
}
LENGTH = 16
TOKENS = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
PADDED = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
PADDED["attention_mask"][0, 11:] = 0
PLAIN = {"input_ids": TOKENS}

t = transformers
# the model, its inputs, whether it skips masks, and which of its attentions have a mask then
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], bool, list[bool]]] = {
    "llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**DECODER)), PLAIN, True, [False, False]),
    "llama, padded": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**DECODER)), PADDED, False, [True, True]),
    "gpt2": (lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)), PLAIN, True, [False, False]),
    "bert": (lambda: t.BertForMaskedLM(t.BertConfig(**SIZES)), PLAIN, True, [False, False]),
    "bert, padded": (lambda: t.BertForMaskedLM(t.BertConfig(**SIZES)), PADDED, False, [True, True]),
    "a window that is shorter": (
        lambda: t.MistralForCausalLM(t.MistralConfig(**DECODER, sliding_window=8)),
        *(PLAIN, False, [True, True]),
    ),
    "a window that is longer": (
        lambda: t.MistralForCausalLM(t.MistralConfig(**DECODER, sliding_window=64)),
        *(PLAIN, True, [False, False]),
    ),
    "a window in the second layer": (
        lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=8, layer_types=BOTH)),
        *(PLAIN, True, [False, True]),
    ),
    "a bias in the mask": (
        lambda: t.FalconForCausalLM(t.FalconConfig(**FALCON, alibi=True, use_cache=False)),
        *(PLAIN, False, [True, True]),
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = CASES[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # so that what a token attends to changes much
    return model.eval()


def masked(model: Any, inputs: dict[str, Any]) -> tuple[list[bool], Any]:
    """Return which attentions of the compiled model have a mask, and the logits."""
    found: list[bool] = []

    def trace(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        found.extend(node.kwargs.get("attn_mask") is not None for node in calls)
        return graph.forward

    torch._dynamo.reset()
    logits = torch.compile(model, backend=trace, fullgraph=True)(**inputs).logits
    return found, logits


@pytest.mark.parametrize("name", CASES)
def test_compiled_models_skip_the_masks_they_do_not_need_and_compute_the_same(name: str) -> None:
    _, inputs, skips, expected = CASES[name]
    model = build(name)
    eager = model(**inputs).logits
    assert skip_masks(model, inputs) is skips
    found, logits = masked(model, inputs)
    assert found == expected
    torch.testing.assert_close(logits, eager, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(**inputs).logits, eager)


def test_without_it_a_compiled_llama_makes_a_mask() -> None:
    assert masked(build("llama"), PLAIN)[0] == [True, True]


def test_padding_that_the_example_does_not_have_is_masked() -> None:
    model = build("llama")
    expected = {side: model(**inputs).logits for side, inputs in sides().items()}
    assert skip_masks(model, PLAIN)
    for side, inputs in sides().items():
        found, logits = masked(model, inputs)
        assert found == [True, True]
        torch.testing.assert_close(logits, expected[side], rtol=1e-4, atol=1e-5)


def sides() -> dict[str, dict[str, Any]]:
    return {"right": PADDED, "left": PADDED | {"attention_mask": PADDED["attention_mask"].flip(-1)}}


def test_a_longer_text_than_the_example_gets_its_window() -> None:
    model = build("a window that is shorter")
    expected = model(**PLAIN).logits
    assert skip_masks(model, {"input_ids": TOKENS[:, :4]})
    found, logits = masked(model, PLAIN)
    assert found == [True, True]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_is_not_compiled_again_after_another_one_skips_masks() -> None:
    torch._dynamo.reset()
    graphs: list[GraphModule] = []
    model = build("llama")
    skip_masks(model, PLAIN)
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    compiled(**PLAIN)
    skip_masks(build("gpt2"), PLAIN)
    compiled(**PLAIN)
    assert len(graphs) == 1


@torch.no_grad()
def test_texts_of_many_lengths_take_one_program() -> None:
    torch._dynamo.reset()
    graphs: list[GraphModule] = []
    model = build("llama")
    skip_masks(model, PLAIN)
    compiled = torch.compile(model, dynamic=True, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    for length in (16, 12, 7):
        inputs = {"input_ids": TOKENS[:, :length].clone()}
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@torch.no_grad()
def test_a_compiled_continuation_of_a_cache_gets_its_mask() -> None:
    model = build("llama")
    expected = model(**PLAIN).logits[:, 10:]
    assert skip_masks(model, PLAIN)
    for cache in (t.DynamicCache(config=model.config), t.StaticCache(config=model.config, max_cache_len=32)):
        model(input_ids=TOKENS[:, :10], past_key_values=cache)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        logits = compiled(input_ids=TOKENS[:, 10:], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_several_texts_in_a_row_stay_apart_where_nothing_is_compiled() -> None:
    model = build("llama")
    positions = torch.arange(LENGTH).remainder(8).expand(2, -1)
    apart = model(**PLAIN, position_ids=positions).logits
    assert not torch.allclose(apart, model(**PLAIN).logits, atol=1e-3)
    skip_masks(model, PLAIN)
    torch.testing.assert_close(model(**PLAIN, position_ids=positions).logits, apart)


def test_a_decoder_that_attends_to_a_padded_text_computes_the_same() -> None:
    torch.manual_seed(0)
    model = t.MarianMTModel(t.MarianConfig(**MARIAN)).eval()
    inputs = PADDED | {"decoder_input_ids": TOKENS[:, :9]}
    eager = model(**inputs).logits
    skip_masks(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**inputs).logits, eager)


@torch.no_grad()
def test_a_prefix_that_the_example_does_not_have_sees_ahead() -> None:
    torch.manual_seed(0)
    model = t.HrmTextForCausalLM(t.HrmTextConfig(**DECODER, head_dim=8)).eval()
    prefix = {"token_type_ids": (torch.arange(LENGTH) < 8).long().expand(2, -1)}
    expected = model(**PLAIN, **prefix).logits
    assert not torch.allclose(expected, model(**PLAIN).logits, atol=1e-3)
    assert skip_masks(model, PLAIN)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**PLAIN, **prefix).logits, expected)


@torch.no_grad()
def test_a_model_that_tests_for_the_name_of_its_attention_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    sparse = {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 1}
    experts = {"num_local_experts": 4, "dense_intermediate_size": 32, "shared_intermediate_size": 32}
    kinds = {"layer_types": ["minimax_m3_sparse"] * 2, "head_dim": 16, "rotary_dim": 8}
    model = MiniMaxM3VLForCausalLM(t.MiniMaxM3VLTextConfig(**DECODER, **sparse, **experts, **kinds)).eval()
    expected = model(**PLAIN).logits
    assert not skip_masks(model, PLAIN)
    assert torch.equal(model(**PLAIN).logits, expected)


def test_it_generates_and_saves_as_before(tmp_path: Path) -> None:
    model, name = build("llama"), "config.json"
    model.save_pretrained(tmp_path / "before")
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "use_cache": True}
    expected = model.generate(**PADDED, **settings)
    assert skip_masks(model, PLAIN)
    assert torch.equal(model.generate(**PADDED, **settings), expected)
    assert torch.equal(deepcopy(model).generate(**PADDED, **settings), expected)
    model.save_pretrained(tmp_path / "after")
    assert (tmp_path / "after" / name).read_text() == (tmp_path / "before" / name).read_text()
    assert t.AutoModelForCausalLM.from_pretrained(tmp_path / "after").config._attn_implementation == "sdpa"


def test_it_is_undone_by_the_name_of_the_attention_before() -> None:
    model = build("llama")
    assert skip_masks(model, PLAIN)
    assert model.config._attn_implementation == SKIPPING
    assert skip_masks(model, PLAIN)
    model.set_attn_implementation("sdpa")
    assert masked(model, PLAIN)[0] == [True, True]


def test_a_model_built_from_the_same_config_is_not_changed() -> None:
    config = t.LlamaConfig(**DECODER)
    model, other = t.LlamaForCausalLM(config), t.LlamaForCausalLM(config)
    assert skip_masks(model, PLAIN)
    assert other.config is config
    assert other.config._attn_implementation == "sdpa"
    own = model.config
    assert all(module.config is own for module in model.modules() if hasattr(module, "config"))
    assert skip_masks(model, PLAIN)
    assert model.config is own
    assert masked(model, PLAIN)[0] == [False, False]
    assert masked(other, PLAIN)[0] == [True, True]


def test_other_ways_to_attend_and_failing_models_are_left_as_they_are() -> None:
    model = build("llama")
    with pytest.raises(RuntimeError, match="indices"):
        skip_masks(model, {"input_ids": TOKENS.float()})
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert not skip_masks(model, PLAIN)
    assert model.config._attn_implementation == "eager"


def test_a_model_that_is_no_transformer_is_refused() -> None:
    with pytest.raises(ValueError, match="model must be one of transformers, got Linear"):
        skip_masks(torch.nn.Linear(2, 2), {})


def test_a_model_that_is_compiled_already_skips_masks_too() -> None:
    model, found = build("llama"), []

    def trace(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        found.append([node.kwargs.get("attn_mask") is not None for node in calls])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=trace)
    compiled(**PLAIN)
    assert skip_masks(compiled, PLAIN)
    compiled(**PLAIN)
    assert found == [[True, True], [False, False]]


def test_low_rank_and_shrunk_attention_compute_the_same() -> None:
    for attention in ("layers", "heads"):
        model = fz.factorize(build("llama"), ratio=0.6, attention=attention)
        eager = model(**PLAIN).logits
        assert skip_masks(model, PLAIN)
        found, logits = masked(model, PLAIN)
        assert found == [False, False]
        torch.testing.assert_close(logits, eager, rtol=1e-4, atol=1e-5)
