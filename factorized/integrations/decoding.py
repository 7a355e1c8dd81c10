"""transformers: low-rank decoder layers of Llama's kind with fewer and earlier launches, to decode one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from factorized.nn.model import Model
from factorized.nn.one_row import multiply
from factorized.nn.one_token import attend_token, counters, has_kernel
from factorized.surgery.replace import replace_module

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen3DecoderLayer")  # all with the same forward
PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
USUAL = ("attention_mask", "past_key_values", "position_embeddings", "position_ids", "use_cache")  # given to attention


def fuse_decoder(model: Model) -> Model:
    """Make the decoder layers of a lowered model decode one sequence faster on a Hopper GPU, in place.

    Queries, keys and values become two products instead of six, as do gate and up. Norms, activation and residuals
    are computed with them, and each product reads its matrix while the one before still runs. With a static cache the
    attention of a token, from rotating queries and keys to writing the cache, is one kernel, for up to eight sequences.
    Compile the model or capture a CUDA graph as before. Other devices and types than bfloat16 and float16, prompts, and
    products of several sequences are computed by plain torch; attention also with other caches (dynamic, sliding,
    offloaded, quantized) and other implementations of attention than ``"sdpa"``.

    Parameters get other names and no gradients, so save the model first. ``output_hidden_states`` finds no layers any
    more. Layers whose projections are not all low-rank stay as they are. Run one call of the model at a time: programs
    of the attention count each other in memory of the layer.

    Args:
        model: of transformers, with layers of Llama, Mistral or Qwen3, after ``fz.lower``.

    Raises:
        ValueError: no layer of the model is of these classes and low-rank, without biases, with SiLU.

    Examples:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
        ... )
        >>> model = transformers.AutoModelForCausalLM.from_config(config)
        >>> model = fz.integrations.fuse_decoder(fz.lower(fz.factorize(model, ratio=0.8)))
        >>> type(model.model.layers[0]).__name__
        'FusedDecoderLayer'
    """
    layers = [(name, layer) for name, layer in model.named_modules() if type(layer).__name__ in KINDS]
    obstacles = {name: _obstacle(layer) for name, layer in layers}
    if all(obstacles.values()):
        first = next(iter(obstacles), None)
        reason = f"{first}.{obstacles[first]}" if first is not None else f"none is of {', '.join(KINDS)}"
        raise ValueError(f"{type(model).__name__} has no decoder layer that can be fused: {reason}")
    for name, layer in layers:
        if not obstacles[name]:
            replace_module(model, name, FusedDecoderLayer(layer))
    return model


class FusedDecoderLayer(nn.Module):
    """A low-rank decoder layer in eight products, and the attention."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.middle_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = _Pairs([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _Pairs([attention.o_proj])
        self.up = _Pairs([mlp.gate_proj, mlp.up_proj])
        self.down = _Pairs([mlp.down_proj])
        attention.q_proj, attention.k_proj, attention.v_proj = _Computed(), _Computed(), _Computed()
        attention.o_proj = nn.Identity()
        self.self_attn = attention
        heads = self.qkv.sizes[0] // attention.head_dim
        self.register_buffer("arrived", counters(heads, self.qkv.second.device), persistent=False)

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:  # (batch, tokens, width) to the same
        """Apply the layer; the arguments are those of its attention."""
        shape, x = hidden_states.shape, hidden_states.flatten(0, -2)
        qkv = self.qkv(x, norm=self.norm)
        cache, mask = _static_cache(self.self_attn, arguments), arguments.get("attention_mask")
        if cache is not None and has_kernel(qkv, cache.keys, cache.values, mask):
            attended = self._attend_token(qkv, cache, arguments)
        else:
            attended = self._attend(qkv, hidden_states, arguments)
        x = self.out(attended, residual=x)
        hidden = self.up(x, norm=self.middle_norm, gated=True)
        return self.down(hidden, residual=x).view(shape)

    def _attend_token(self, qkv: Tensor, cache: Any, arguments: dict[str, Any]) -> Tensor:
        """Return the attention of one token of each sequence, and store it in a layer of a cache."""
        attention, length = self.self_attn, cache.cumulative_length
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        weights = [None if norm is None else norm.weight for norm in norms]
        eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
        # Masks and positions come from the first layer's length. The compiler may compute them again for later layers,
        # and does not expect that a kernel has changed it by then.
        first = attention.layer_idx == arguments["past_key_values"].is_sliding.index(False)
        stored = (cache.keys, cache.values, *((None, length) if first else (length, None)), arguments["attention_mask"])
        turns = arguments["position_embeddings"]
        attended = attend_token(qkv, *turns, *stored, self.arrived, attention.scaling, *weights, eps)
        if first:
            length.add_(1)
        return attended

    def _attend(self, qkv: Tensor, hidden_states: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the output of transformers' attention for these queries, keys and values."""
        attention, parts = self.self_attn, qkv.view(*hidden_states.shape[:-1], -1).split(self.qkv.sizes, -1)
        attention.q_proj.output, attention.k_proj.output, attention.v_proj.output = parts
        attended: Tensor = attention(hidden_states=hidden_states, **arguments)[0]
        return attended.flatten(0, -2)


class _Pairs(nn.Module):
    """Low-rank layers of one input: first factors one below the other, and second ones, padded to one rank."""

    def __init__(self, pairs: Sequence[Any]) -> None:
        super().__init__()
        firsts, seconds = ([pair[place].weight.detach() for pair in pairs] for place in (0, 1))
        self.sizes, self.ranks = ([second.shape[dim] for second in seconds] for dim in (0, 1))
        padded = [pad(second, (0, max(self.ranks) - second.shape[1])) for second in seconds]
        self.first = nn.Parameter(torch.cat(firsts), requires_grad=False)
        self.second = nn.Parameter(torch.cat(padded), requires_grad=False)

    def forward(
        self, x: Tensor, norm: Any = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:  # (rows, inputs) to (rows, all outputs)
        """Apply the layers, side by side."""
        scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
        thin = multiply(x, self.first, norm=scale, eps=eps)
        parts = list(zip(self.sizes, self.ranks, strict=True))
        return multiply(thin, self.second, residual=residual, gated=gated, parts=parts)


class _Computed(nn.Module):
    """A projection whose output was computed before."""

    output: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the output and drop the reference to it."""
        output = self.output
        del self.output
        return output


def _static_cache(attention: Any, arguments: dict[str, Any]) -> Any:
    """Return the layer of a static cache that an attention uses, if all else that it is given is as usual; or None."""
    cache: Any = arguments.get("past_key_values")
    if type(cache).__name__ != "StaticCache" or cache.offloading or attention.config._attn_implementation != "sdpa":
        return None
    if any(given is not None and given is not False for name, given in arguments.items() if name not in USUAL):
        return None
    if attention._forward_hooks or attention._forward_pre_hooks or (attention.training and attention.attention_dropout):
        return None
    layer = cache.layers[attention.layer_idx]
    return layer if type(layer).__name__ == "StaticLayer" and layer.is_initialized else None


def _obstacle(layer: Any) -> str:
    """Return why a decoder layer cannot be fused; an empty text if it can."""
    act = layer.mlp.act_fn
    if not isinstance(act, nn.SiLU) and type(act).__name__ != "SiLUActivation":
        return f"mlp.act_fn must be SiLU, got {act}"
    for name in PROJECTIONS:
        found = layer.get_submodule(name)
        linears = [part for part in found.children() if isinstance(part, nn.Linear) and part.bias is None]
        if not isinstance(found, nn.Sequential) or not len(found) == len(linears) == 2:
            return f"{name} must be a pair of linears without bias, as fz.lower makes it, got {found}"
    return ""
