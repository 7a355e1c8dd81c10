"""transformers: low-rank decoder layers of Llama's kind with fewer and earlier launches, to decode one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from factorized.nn.model import Model
from factorized.nn.one_row import multiply
from factorized.surgery.replace import replace_module

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen3DecoderLayer")  # all with the same forward
PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def fuse_decoder(model: Model) -> Model:
    """Make the decoder layers of a lowered model faster where a Hopper GPU decodes one sequence; in place.

    Queries, keys and values become two products instead of six, as do gate and up. Norms, activation and residuals
    are computed with them, and each product reads its matrix while the one before still runs. Compile the model or
    capture a CUDA graph as before. Prompts, several sequences, other devices and types than bfloat16 and float16 are
    computed by plain torch.

    Parameters get other names and no gradients, so save the model first. ``output_hidden_states`` finds no layers any
    more. Layers whose projections are not all low-rank stay as they are.

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

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:  # (batch, tokens, width) to the same
        """Apply the layer; the arguments are those of its attention."""
        shape, x, attention = hidden_states.shape, hidden_states.flatten(0, -2), self.self_attn
        qkv = self.qkv(x, norm=self.norm).view(*shape[:-1], -1).split(self.qkv.sizes, -1)
        attention.q_proj.output, attention.k_proj.output, attention.v_proj.output = qkv
        attended = attention(hidden_states=hidden_states, **arguments)[0]
        x = self.out(attended.flatten(0, -2), residual=x)
        hidden = self.up(x, norm=self.middle_norm, gated=True)
        return self.down(hidden, residual=x).view(shape)


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
        """Return the output, and keep it no longer."""
        output = self.output
        del self.output
        return output


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
