"""``torch.nn.MultiheadAttention`` with shrunk heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from factorized._checks import check_whole
from factorized.attention.unit import Shrunk
from factorized.nn.recorded import recorded_call

SETTINGS = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")


class ShrunkMultiheadAttention(nn.Module):
    """Attention with the signature of ``nn.MultiheadAttention``, and any head size for queries and keys and for values.

    ``qk_size`` is the head size of queries and keys, ``ov_size`` that of values; ``scale`` multiplies the scores. The
    state dict holds a weight and a bias for each of ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``; that of the
    dense module holds ``in_proj_weight`` and ``in_proj_bias`` for the first three.
    """

    # Torch's encoder layer checks these before it takes a fast path that does not support this module.
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        qk_size: int,
        ov_size: int,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole("num_heads", num_heads, least=1)
        check_whole("qk_size", qk_size, least=1)
        check_whole("ov_size", ov_size, least=1)
        if embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim, got {num_heads} and {embed_dim}")
        head_size = embed_dim // num_heads
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.scale = head_size**-0.5 if scale is None else scale
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.shrunk = Shrunk(head_size, qk_size, ov_size)
        self.q_proj = nn.Linear(embed_dim, num_heads * qk_size, bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(self.kdim, num_heads * qk_size, bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(self.vdim, num_heads * ov_size, bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(num_heads * ov_size, embed_dim, bias, device=device, dtype=dtype)

    @classmethod
    def like(cls, dense: nn.MultiheadAttention, qk_size: int, ov_size: int) -> ShrunkMultiheadAttention:
        """Return a module with the settings of ``dense`` and heads of these sizes, on the meta device."""
        bias = dense.in_proj_bias is not None
        new = cls(qk_size=qk_size, ov_size=ov_size, bias=bias, device="meta", **_settings(dense))
        _keep_output_bias(dense, new)
        return new

    def forward(
        self,
        query: Tensor,  # (N, L, E), (L, N, E) without batch_first, or (L, E)
        key: Tensor,  # the same with S and kdim
        value: Tensor,  # the same with S and vdim
        key_padding_mask: Tensor | None = None,  # (N, S) or (S,)
        need_weights: bool = True,
        attn_mask: Tensor | None = None,  # (L, S) or (N·heads, L, S)
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as ``nn.MultiheadAttention`` does."""
        if isinstance(query, Proxy):
            options = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return recorded_call(self, query, key, value, *options)
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal is a hint about attn_mask: pass that mask as well, as for nn.MultiheadAttention"
            )
        is_batched = _is_batched(query, key, value)
        if not is_batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        if not key.shape[:-1] == value.shape[:-1] == (query.shape[0], key.shape[1]):
            raise ValueError(
                "query, key and value must have the same batch size, and key and value the same length, got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)} with the batch first"
            )
        q, k, v = self._by_head(self.q_proj(query)), self._by_head(self.k_proj(key)), self._by_head(self.v_proj(value))
        mask = self._merged(attn_mask, key_padding_mask, q, k)
        # As in nn.MultiheadAttention, the hint then replaces the mask, also with add_zero_attn.
        only_causal = is_causal and key_padding_mask is None and not need_weights
        attended, weights = self._attend(q, k, v, None if only_causal else mask, only_causal, need_weights)
        output = self.out_proj(attended.transpose(1, 2).flatten(-2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not is_batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _attend(
        self,
        q: Tensor,  # (N, heads, L, qk_size)
        k: Tensor,  # (N, heads, S, qk_size)
        v: Tensor,  # (N, heads, S, ov_size)
        mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:  # (N, heads, L, ov_size), (N, heads, L, S)
        """Return the weighted values, and the weights if they are needed."""
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            mask = None if mask is None else F.pad(mask, (0, 1))
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=self.scale), None
        scores = (q * self.scale) @ k.mT
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
        return weights @ v, weights

    def _by_head(
        self,
        projected: Tensor,  # (N, length, heads · size)
    ) -> Tensor:  # (N, heads, length, size)
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _merged(
        self,
        attn_mask: Tensor | None,
        padding: Tensor | None,
        q: Tensor,  # (N, heads, L, qk_size)
        k: Tensor,  # (N, heads, S, qk_size)
    ) -> Tensor | None:  # (N or 1, heads or 1, L or 1, S)
        """Return both masks as one that is added to the scores."""
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        masks = []
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, (queries, keys), (batch * heads, queries, keys))
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads)) if attn_mask.dim() == 3 else attn_mask[None, None]
            masks.append(_added(attn_mask, q.dtype))
        if padding is not None:
            _check_mask("key_padding_mask", padding, (batch, keys))
            masks.append(_added(padding[:, None, None, :], q.dtype))
        return masks[0] if len(masks) == 1 else masks[0] + masks[1] if masks else None

    def extra_repr(self) -> str:
        """Show the sizes."""
        note = self.shrunk
        return f"{self.embed_dim}, heads={self.num_heads}, qk={note.qk}, ov={note.ov} of {note.head_size}"


def dense_multihead(module: nn.Module) -> nn.MultiheadAttention | None:
    """Return the ``nn.MultiheadAttention`` that a shrunk one came from, on the meta device; None for other modules."""
    if not isinstance(module, ShrunkMultiheadAttention):
        return None
    new = nn.MultiheadAttention(bias=module.q_proj.bias is not None, device="meta", **_settings(module))
    _keep_output_bias(module, new)
    return new


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the arguments that a dense module and its shrunk version have in common."""
    return {name: getattr(module, name) for name in SETTINGS}


def _keep_output_bias(old: nn.Module, new: nn.Module) -> None:
    """Give ``new`` an output bias, on the meta device, if ``old`` has an output bias and no other."""
    projection = new.get_submodule("out_proj")
    bias = old.get_submodule("out_proj").bias
    if isinstance(bias, Tensor) and projection.bias is None:
        projection.bias = nn.Parameter(torch.empty_like(bias, device="meta"))


def _is_batched(query: Tensor, key: Tensor, value: Tensor) -> bool:
    dims = query.dim()
    if dims not in (2, 3) or not dims == key.dim() == value.dim():
        raise ValueError(
            "query, key and value must have three dimensions each, or two without a batch, got "
            f"{dims}, {key.dim()} and {value.dim()}"
        )
    return dims == 3


def _check_mask(name: str, mask: Tensor, *allowed: tuple[int, ...]) -> None:
    """Raise where adding ``mask`` to the scores would silently broadcast or mean something else."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name} must be bool (True: not attended to) or floating point (added to the scores), got "
            f"{str(mask.dtype).removeprefix('torch.')}; if it is 1 where attention is allowed, pass mask == 0"
        )
    if tuple(mask.shape) not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(str, allowed))}, got {tuple(mask.shape)}")


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)


_KEPT_OFF = "nested_before_shrinking"  # marks an encoder that used nested tensors before its attention was shrunk


def keep_off_nested_tensors(model: nn.Module) -> None:
    """Switch nested tensors off in torch's encoders that hold shrunk attention, which cannot take them."""
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and encoder.use_nested_tensor and _holds_shrunk(encoder):
            encoder.use_nested_tensor = False
            encoder.__dict__[_KEPT_OFF] = True


def allow_nested_tensors(model: nn.Module) -> None:
    """Switch nested tensors on again in encoders that no longer hold shrunk attention."""
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder) or _holds_shrunk(encoder):
            continue
        if encoder.__dict__.pop(_KEPT_OFF, False):
            encoder.use_nested_tensor = True


def _holds_shrunk(encoder: nn.Module) -> bool:
    return any(isinstance(module, ShrunkMultiheadAttention) for module in encoder.modules())
