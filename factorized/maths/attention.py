"""The forms of attention as matrices: rebalancing and truncating a product of two thin factors, biases included."""

from __future__ import annotations

import torch
from torch import Tensor

from factorized.maths.spectral import spectral_factors


def rebalance(
    U: Tensor,  # (..., m, k)
    V: Tensor,  # (..., n, k)
    rank: int,
) -> tuple[Tensor, Tensor]:  # (..., m, rank), (..., n, rank)
    """Return the spectral factors of ``U Vᵀ``: its best approximation of that rank, with equal shares of √Σ.

    The SVD is that of the k×k core between two thin QR decompositions; nothing m×n is formed. Half types are computed
    in float32.
    """
    half = U.dtype in (torch.float16, torch.bfloat16)
    (Q, R), (P, T) = (torch.linalg.qr(factor.float() if half else factor) for factor in (U, V))
    A, B = spectral_factors(R @ T.mT, rank, "exact")
    return (Q @ A).to(U.dtype), (P @ B).to(V.dtype)


def with_bias_row(
    W: Tensor,  # (heads, m, k)
    bias: Tensor | None,  # (heads, k)
) -> Tensor:  # (heads, m + 1, k)
    """Return the matrix that multiplies ``[x, 1]``: ``W`` above its bias, or above zeros where there is none."""
    row = W.new_zeros(W.shape[0], W.shape[2]) if bias is None else bias
    return torch.cat([W, row.unsqueeze(1)], dim=1)


def folded_values(
    output: Tensor,  # (heads, out, k)
    bias: Tensor,  # (kv_heads, k)
) -> Tensor:  # (out,)
    """Return ``Σ_h O_h b_h``, what value biases add to the output where attention weights sum to one."""
    per_head = bias.repeat_interleave(output.shape[0] // bias.shape[0], dim=0)
    return torch.einsum("hok,hk->o", output, per_head)


def stacked_by_group(
    factor: Tensor,  # (heads, m, k)
    groups: int,
) -> Tensor:  # (heads / groups, groups·m, k)
    """Return the matrices of the query heads that share one K/V head, one below the other.

    The SVD of the stack times the shared matrix is the best choice for all of them together.
    """
    return factor.unflatten(0, (-1, groups)).flatten(1, 2)


def unstacked(
    stack: Tensor,  # (kv_heads, groups·m, k)
    groups: int,
) -> Tensor:  # (heads, m, k)
    """Undo ``stacked_by_group``."""
    return stack.unflatten(1, (groups, -1)).flatten(0, 1)
