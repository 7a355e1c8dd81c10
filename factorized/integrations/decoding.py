"""transformers: decoder layers of Llama's kind, for few rows, with few launches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from factorized.nn.few_rows import Chain


class Together(nn.Module):
    """Layers of one input: dense ones as one matrix, low-rank pairs as two."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        pairs = [layer if isinstance(layer, nn.Sequential) else [layer] for layer in layers]
        rank = max(pair[-1].weight.shape[1] for pair in pairs)
        self.first: nn.Parameter | None = None
        if len(pairs[0]) == 2:
            added = [rank - len(first.weight) for first, _ in pairs]
            self.first = _frozen(
                torch.cat([pad(first.weight, (0, 0, 0, more)) for (first, _), more in zip(pairs, added, strict=True)])
            )
        seconds = [pad(pair[-1].weight, (0, rank - pair[-1].weight.shape[1])) for pair in pairs]
        self.second = _frozen(torch.cat(seconds))
        self.sizes = [len(second) for second in seconds]

    def tensors(self) -> list[Tensor]:
        """Return the matrices."""
        return [self.second] if self.first is None else [self.first, self.second]

    def add_to(
        self, chain: Chain, x: int, begin: int, *, norm: int = -1, residual: int = -1, gated: bool = False
    ) -> int:
        """Add the layers' stages; ``begin`` is the number of their first matrix. Return the number of the result."""
        ends = list(accumulate(self.sizes)) if not gated and len(self.sizes) > 1 else []
        if self.first is None:
            return chain.add(x, begin, norm=norm, residual=residual, gated=gated)
        thin = chain.add(x, begin, norm=norm)
        return chain.add(thin, begin + 1, residual=residual, gated=gated, ends=ends)


class _Waiting(nn.Module):
    """A projection whose output was computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        output, self.output = self.output, None
        assert output is not None
        return output


class DecoderLayer(nn.Module):
    """A layer of a decoder; ``joined`` computes queries, keys and values of the next layer in the same launch."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = Together([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = Together([attention.o_proj])
        self.up = Together([mlp.gate_proj, mlp.up_proj])
        self.down = Together([mlp.down_proj])
        self.norm = _frozen(layer.input_layernorm.weight)
        self.middle_norm = _frozen(layer.post_attention_layernorm.weight)
        self.eps = layer.input_layernorm.variance_epsilon
        self.projections = nn.ModuleList([_Waiting() for _ in range(3)])
        attention.q_proj, attention.k_proj, attention.v_proj = self.projections
        attention.o_proj = nn.Identity()
        self.attention = attention
        self.next: list[DecoderLayer] = []  # in a list: it is not a part of this layer
        self.ready = False  # queries, keys and values are there
        self.split = False  # the feed-forward block is a launch of its own

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """Apply the layer."""
        shape = hidden_states.shape
        x = hidden_states.flatten(0, -2)
        if not self.ready:
            chain = Chain([x, *self.qkv.tensors(), self.norm], self.eps)
            number = self.qkv.add_to(chain, 0, 1, norm=len(chain.inputs) - 1)
            self.receive(chain.run(number)[0], shape)
        self.ready = False
        attended = self.attention(hidden_states=hidden_states, **arguments)[0].flatten(0, -2)
        after = self.next[0] if self.next else None
        parts = [self.out, self.up, self.down, *([after.qkv] if after else [])]
        inputs = [x, attended]
        begins = []
        for part in parts:
            begins.append(len(inputs))
            inputs += part.tensors()
        inputs += [self.middle_norm, *([after.norm] if after else [])]
        if self.split:
            chain = Chain([x, attended, *self.out.tensors()], self.eps)
            x = chain.run(self.out.add_to(chain, 1, 2, residual=0))[0]
            inputs[0] = x
        chain = Chain(inputs, self.eps)
        middle = 0 if self.split else self.out.add_to(chain, 1, begins[0], residual=0)
        number = self.up.add_to(chain, middle, begins[1], norm=begins[2] + len(self.down.tensors()) + (len(after.qkv.tensors()) if after else 0), gated=True)  # fmt: skip
        number = self.down.add_to(chain, number, begins[2], residual=middle)
        if after is None:
            return chain.run(number)[0].view(shape)
        last = after.qkv.add_to(chain, number, begins[3], norm=len(inputs) - 1)
        y, qkv = chain.run(number, last)
        after.receive(qkv, shape)
        after.ready = True
        return y.view(shape)

    def receive(self, qkv: Tensor, shape: Sequence[int]) -> None:
        """Keep the outputs of the projections until the attention asks for them."""
        for projection, output in zip(self.projections, qkv.split(self.qkv.sizes, -1), strict=True):
            projection.output = output.unflatten(0, shape[:-1])


def fuse_decoder(model: nn.Module, *, joined: bool = True) -> None:
    """Replace the decoder layers of a model of Llama's kind, dense or lowered, by ones with fewer launches."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and name == "layers":
                layers = [DecoderLayer(layer) for layer in child]
                for layer, after in pairwise(layers):
                    layer.next = [after] if joined else []
                    layer.split = not joined
                layers[-1].split = not joined
                module.layers = nn.ModuleList(layers)


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().contiguous(), requires_grad=False)
