"""The matrices of attention, head by head, read from the weights with nothing of the library."""

from __future__ import annotations

from torch import Tensor, nn

Matrices = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # per query head: Q, K, V, O, each (model side, head size)


def explicit_heads(module: nn.Module) -> Matrices:
    """Return Q, K, V and O of every query head, copied out of an attention module of any class in the zoo."""
    q, k, v, o, heads, kv_heads = _weights(module)
    size, groups = q.shape[0] // heads, heads // kv_heads
    result = []
    for head in range(heads):
        own, shared = (slice(i * size, (i + 1) * size) for i in (head, head // groups))
        result.append((q[own].T.clone(), k[shared].T.clone(), v[shared].T.clone(), o[:, own].clone()))
    return result


def _weights(m: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """Return the four weights in the layout of ``nn.Linear``, and the numbers of heads."""
    name = type(m).__name__
    if name == "MultiheadAttention":
        packed = m.in_proj_weight is not None
        q, k, v = m.in_proj_weight.chunk(3) if packed else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
        return q, k, v, m.out_proj.weight, m.num_heads, m.num_heads
    if name == "OwnAttention":
        return *m.qkv.weight.chunk(3), m.proj.weight, m.heads, m.heads
    if name in ("BertAttention", "RobertaAttention"):
        inner = m.self
        heads = inner.num_attention_heads
        return inner.query.weight, inner.key.weight, inner.value.weight, m.output.dense.weight, heads, heads
    if name == "GPT2Attention":
        if m.is_cross_attention:
            q, (k, v) = m.q_attn.weight.T, m.c_attn.weight.T.chunk(2)
        else:
            q, k, v = m.c_attn.weight.T.chunk(3)
        return q, k, v, m.c_proj.weight.T, m.num_heads, m.num_heads
    output = m.out_proj if name in ("MarianAttention", "BartAttention") else m.o_proj
    heads = m.q_proj.weight.shape[0] // m.head_dim
    return (
        m.q_proj.weight,
        m.k_proj.weight,
        m.v_proj.weight,
        output.weight,
        heads,
        m.k_proj.weight.shape[0] // m.head_dim,
    )
