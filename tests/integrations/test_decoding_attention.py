"""Where fused decoder layers leave the attention of a token to its kernel, and where to transformers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import factorized as fz
from factorized.integrations import decoding
from factorized.nn import one_token
from tests.integrations.test_decoding import CONFIGS, SIZES, build
from tests.interpreted import needs_interpreter, run_interpreted
from tests.nn.test_one_token import attend_plainly

LAYERS = SIZES["num_hidden_layers"]
INTERPRETED = """
import torch, transformers
from tests.integrations.test_decoding import CONFIGS
from tests.integrations.test_decoding_attention import both, decode
for name in CONFIGS:
    decode(*both(name), 2, 3)
model, fused = both("llama")
compiled = torch.compile(fused, fullgraph=True, dynamic=False)
decode(model, fused, 1, 3, run=compiled)
decode(model, fused, 2, 3, run=compiled)
with torch.inference_mode():
    decode(model, fused, 1, 2)
"""


def both(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a lowered model, and a fused one."""
    model = build(CONFIGS[name](), 0.6)
    return model, fz.integrations.fuse_decoder(deepcopy(model))


@torch.no_grad()
def decode(
    model: Any,
    fused: Any,
    sequences: int,
    tokens: int,
    *,
    run: Callable[..., Any] | None = None,
    cache: Callable[..., Any] = transformers.StaticCache,
    at_once: int = 1,
    most: float | None = None,
    **arguments: Any,
) -> None:
    """Compare the logits and caches of both after a prompt; ``run`` gives those of the fused model's tokens."""
    last = fused if run is None else run
    caches = [cache(config=model.config, max_cache_len=40) for _ in range(2)]
    x = torch.randint(0, 100, (sequences, 7))
    for which, held in zip((model, fused), caches, strict=True):
        which(x, past_key_values=held)
    for _ in range(tokens):
        x = torch.randint(0, 100, (sequences, at_once))
        wanted = model(x, past_key_values=caches[0], **arguments).logits
        close(last(x, past_key_values=caches[1], **arguments).logits, wanted, most)
    assert int(caches[1].get_seq_length()) == 7 + tokens * at_once
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert torch.equal(torch.as_tensor(ours.get_seq_length()), torch.as_tensor(theirs.get_seq_length()))
        close(ours.keys, theirs.keys, most)
        close(ours.values, theirs.values, most)


def close(actual: Tensor, wanted: Tensor, most: float | None) -> None:
    if most is None:
        torch.testing.assert_close(actual, wanted)
    else:
        assert (actual.double() - wanted.double()).norm() < most * wanted.double().norm()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let plain torch do what the kernel does, on the CPU; return the arguments of all calls."""
    seen: list[Any] = []

    def attend(*given: Any) -> Tensor:
        seen.append(given)
        return attend_plainly(*given)

    monkeypatch.setattr(one_token, "can_launch", lambda x: True)
    monkeypatch.setattr(decoding, "attend_token", attend)
    return seen


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_with_a_static_cache_the_kernel_attends_to_what_transformers_would(
    name: str, sequences: int, calls: list[Any]
) -> None:
    decode(*both(name), sequences, 4)
    assert len(calls) == 4 * LAYERS


def test_padding_on_the_left_is_not_attended_to(calls: list[Any]) -> None:
    prompt, mask = torch.randint(1, 100, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    settings |= {"attention_mask": mask, "cache_implementation": "static", "disable_compile": True}
    model, fused = both("llama")
    assert torch.equal(fused.generate(prompt, **settings), model.generate(prompt, **settings))
    assert len(calls) == 4 * LAYERS


class OwnCache(transformers.StaticCache):
    """Might store keys and values in its own way."""


def dynamic(config: Any, max_cache_len: int) -> Any:
    return transformers.DynamicCache(config=config)


@pytest.mark.parametrize(
    ("how", "sequences"),
    [
        ({"cache": dynamic}, 1),
        ({"at_once": 2}, 1),
        ({"output_attentions": True}, 1),
        ({"is_causal": True}, 1),
        ({"cache": OwnCache}, 1),
        ({}, one_token.SEQUENCES + 1),
    ],
)
def test_other_caches_and_more_tokens_or_sequences_are_left_to_transformers(
    how: dict[str, Any], sequences: int, calls: list[Any]
) -> None:
    decode(*both("llama"), sequences, 2, **how)
    assert not calls


def test_sliding_windows_are_left_to_transformers(calls: list[Any]) -> None:
    config = transformers.Qwen3Config(
        **SIZES, head_dim=32, use_sliding_window=True, sliding_window=9, max_window_layers=1
    )
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    model = build(config, 0.6)
    decode(model, fz.integrations.fuse_decoder(deepcopy(model)), 2, 6)
    assert len(calls) == 6  # of the first layer


def test_an_attention_with_a_hook_is_called(calls: list[Any]) -> None:
    model, fused = both("llama")
    seen: list[Any] = []
    fused.model.layers[1].self_attn.register_forward_hook(lambda *given: seen.append(given))
    decode(model, fused, 1, 2)
    assert len(seen) == 3
    assert len(calls) == 2 * (LAYERS - 1)


def take_own(fused: Any, cache: Any) -> None:
    transformers.AttentionInterface.register("own", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("own", sdpa_mask)
    fused.set_attn_implementation("own")


def drop_out(fused: Any, cache: Any) -> None:
    fused.train()
    for layer in fused.model.layers:
        layer.self_attn.attention_dropout = 0.1


def offload(fused: Any, cache: Any) -> None:
    cache.offloading = True
    cache.update = lambda keys, values, layer: cache.layers[layer].update(keys, values)


def forget(fused: Any, cache: Any) -> None:
    for layer in cache.layers:
        layer.is_initialized = False


@pytest.mark.parametrize("change", [take_own, drop_out, offload, forget])
def test_it_is_where_only_transformers_does_what_is_asked(change: Callable[..., None], calls: list[Any]) -> None:
    fused = both("llama")[1]
    cache = transformers.StaticCache(config=fused.config, max_cache_len=40)
    with torch.no_grad():
        fused(torch.randint(0, 100, (1, 7)), past_key_values=cache)
        change(fused, cache)
        fused(torch.randint(0, 100, (1, 1)), past_key_values=cache)
    assert not calls


def test_counters_are_not_saved() -> None:
    assert not any("arrived" in name for name in both("llama")[1].state_dict())


@pytest.mark.nightly
@needs_interpreter
def test_the_interpreted_kernel_decodes_what_transformers_does_compiled_too() -> None:
    run_interpreted(INTERPRETED)
