"""``torch.nn.MultiheadAttention``, packed or separate, and the module that stands for it once it is shrunken."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from factorized.adapters.family import Family, UnreadableAttention, plain_bias, plain_weight
from factorized.adapters.unit import AttentionUnit, Projection

SHRUNKEN = Family("q_proj", "k_proj", "v_proj", "out_proj", heads="num_heads", one_size=False)


def read_shrunken(module: nn.Module) -> AttentionUnit:
    """Read what a shrunken ``nn.MultiheadAttention`` has become."""
    return replace(SHRUNKEN(module), sums_to_one=not module.add_zero_attn)


def read_multihead(module: nn.Module) -> AttentionUnit:
    """Read an ``nn.MultiheadAttention``."""
    assert isinstance(module, nn.MultiheadAttention)
    if module.bias_k is not None or module.bias_v is not None:
        raise UnreadableAttention(
            "add_bias_kv=True appends a learned key and value, which are no product of two matrices"
        )
    heads, size, width = module.num_heads, module.head_dim, module.embed_dim
    packed = module._qkv_same_embed_dim
    bias = plain_bias(module, "in_proj_bias")
    names = ["in_proj_weight"] * 3 if packed else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    inputs = []
    for index, name in enumerate(names):
        weight = module._parameters.get(name)
        if weight is None:
            raise UnreadableAttention(f"{name} is computed by another rule (pruning, a parametrization)")
        start = index * width
        inputs.append(Projection("", weight, bias, heads, size, 0, start if packed else 0, start))
    weight = plain_weight(module.out_proj, "out_proj")
    output = Projection("out_proj", weight, plain_bias(module.out_proj, "out_proj.bias"), heads, size, 1)
    query, key, value = inputs
    return AttentionUnit(
        module,
        query,
        key,
        value,
        output,
        rotary=False,
        head_size=size,
        one_size=False,
        sums_to_one=not module.add_zero_attn,
    )
