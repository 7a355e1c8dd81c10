"""transformers: decoder layers of Llama's kind whose matrices run as one chain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from factorized.nn.few_rows import PARTS, Chain, Result
from factorized.nn.model import Model

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen3DecoderLayer")


def fuse_decoder(model: Model, *, joined: bool = True) -> Model:
    """Make the decoder layers of ``model`` run with two launches each where a GPU decodes few tokens at a time.

    One is the attention; the other multiplies by all matrices from its output projection up to the queries, keys and
    values of the next layer, with norms, activation and residuals. It is in place, for inference in bfloat16 or float16
    by up to eight sequences on Hopper GPUs; elsewhere, and for prompts, the layers compute the same by plain torch.
    Compile the model, or capture it in a CUDA graph, as without it. Layers may be dense, or low-rank pairs of
    ``fz.lower``. Parameters get other names and need no gradient, so save the model before.

    Args:
        model: of transformers, with layers of Llama, Mistral or Qwen3.

    Raises:
        ValueError: the model has other layers, or layers with biases or of more than two factors.
    """
    owner, old = _decoder_layers(model)
    layers = [FusedDecoderLayer(layer, f"layers.{place}") for place, layer in enumerate(old)]
    for layer, following in pairwise(layers):
        layer.following = [following] if joined else []
    for layer in layers:
        layer.split = not joined
    owner.layers = nn.ModuleList(layers)
    return model


class FusedDecoderLayer(nn.Module):
    """A decoder layer that also computes the queries, keys and values of the next one."""

    def __init__(self, layer: Any, name: str) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
            raise ValueError(f"{name}.mlp.act_fn: expected SiLU, got {mlp.act_fn}; compile the model as it is")
        self.qkv = _together(attention, ["q_proj", "k_proj", "v_proj"], f"{name}.self_attn")
        self.out = _together(attention, ["o_proj"], f"{name}.self_attn")
        self.up = _together(mlp, ["gate_proj", "up_proj"], f"{name}.mlp")
        self.down = _together(mlp, ["down_proj"], f"{name}.mlp")
        self.norm = _frozen(layer.input_layernorm.weight)
        self.middle_norm = _frozen(layer.post_attention_layernorm.weight)
        self.eps = layer.input_layernorm.variance_epsilon
        self.projections = nn.ModuleList([_Computed() for _ in range(PARTS)])
        attention.q_proj, attention.k_proj, attention.v_proj = self.projections
        attention.o_proj = nn.Identity()
        self.self_attn = attention
        self.following: list[FusedDecoderLayer] = []  # in a list: it is not a part of this layer
        self.ready = False  # whether queries, keys and values are computed
        self.split = False

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:  # (batch, tokens, width) to the same
        """Apply the layer; the arguments are those of its attention."""
        shape, x = hidden_states.shape, hidden_states.flatten(0, -2)
        if not self.ready:
            chain = Chain(self.eps)
            self._receive(chain.run(self.qkv.add_to(chain, x, norm=self.norm))[0], shape)
        self.ready = False
        attended = self.self_attn(hidden_states=hidden_states, **arguments)[0].flatten(0, -2)
        chain = Chain(self.eps)
        result = self.out.add_to(chain, attended, residual=x)
        middle: Tensor | Result = result
        if self.split:
            middle = chain.run(result)[0]
            chain = Chain(self.eps)
        hidden = self.up.add_to(chain, middle, norm=self.middle_norm, gated=True)
        last = self.down.add_to(chain, hidden, residual=middle)
        if not self.following:
            return chain.run(last)[0].view(shape)
        following = self.following[0]
        y, qkv = chain.run(last, following.qkv.add_to(chain, last, norm=following.norm))
        following._receive(qkv, shape)
        following.ready = True
        return y.view(shape)

    def _receive(self, qkv: Tensor, shape: Sequence[int]) -> None:
        """Keep the outputs of the projections until the attention asks for them."""
        for projection, output in zip(self.projections, qkv.split(self.qkv.sizes, -1), strict=True):
            projection.output = output.unflatten(0, shape[:-1])


class _Together(nn.Module):
    """Layers of one input: dense ones as one matrix, low-rank pairs as two."""

    def __init__(self, layers: Sequence[list[nn.Linear]]) -> None:
        super().__init__()
        seconds = [layer[-1].weight for layer in layers]
        rank = max(second.shape[1] for second in seconds)
        self.sizes = [len(second) for second in seconds]
        self.second = _frozen(torch.cat([pad(second, (0, rank - second.shape[1])) for second in seconds]))
        self.first: nn.Parameter | None = None
        if len(layers[0]) == 2:
            firsts = [layer[0].weight for layer in layers]
            self.first = _frozen(torch.cat([pad(first, (0, 0, 0, rank - len(first))) for first in firsts]))

    def add_to(
        self,
        chain: Chain,
        x: Tensor | Result,
        *,
        norm: Tensor | None = None,
        residual: Tensor | Result | None = None,
        gated: bool = False,
    ) -> Result:
        """Add the stages of the layers and return their results, side by side."""
        if self.first is None:
            return chain.add(x, self.second, norm=norm, residual=residual, gated=gated)
        thin = chain.add(x, self.first, norm=norm)
        ends = [] if gated else list(accumulate(self.sizes))[:-1]
        return chain.add(thin, self.second, residual=residual, gated=gated, ends=ends)


class _Computed(nn.Module):
    """A projection whose output was computed before."""

    output: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, and keep it no longer."""
        output = self.output
        del self.output
        return output


def _together(parent: nn.Module, children: Sequence[str], name: str) -> _Together:
    layers = [_linears(parent.get_submodule(child), f"{name}.{child}") for child in children]
    if len({len(layer) for layer in layers}) > 1:
        raise ValueError(f"{name}: {', '.join(children)} must all be dense or all low-rank; factorize them alike")
    return _Together(layers)


def _linears(layer: nn.Module, name: str) -> list[nn.Linear]:
    linears = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    plain = isinstance(layer, nn.Linear) or (isinstance(layer, nn.Sequential) and len(layer) == len(linears) == 2)
    if not plain or any(linear.bias is not None for linear in linears):
        raise ValueError(f"{name}: expected a linear without bias, or a pair of them as of fz.lower, got {layer}")
    return linears


def _decoder_layers(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Return the module that holds the decoder layers, and these."""
    for module in model.modules():
        layers = dict(module.named_children()).get("layers")
        if isinstance(layers, nn.ModuleList):
            found = sorted({type(layer).__name__ for layer in layers})
            if set(found) <= set(KINDS):
                return module, list(layers)
            raise ValueError(
                f"layers must be of {', '.join(KINDS)}, got {', '.join(found)}; compile the model as it is"
            )
    raise ValueError(f"{type(model).__name__} has no list of decoder layers; compile it as it is")


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().contiguous(), requires_grad=False)
