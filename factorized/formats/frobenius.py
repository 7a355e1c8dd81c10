"""‖U M₁…M_d Vᵀ‖² and its gradients, the quantity that Frobenius decay penalizes (section 3.2).

Every function takes leading batch dimensions and never forms the product where Gram matrices are cheaper. Batch
dimensions broadcast: one matrix may be a factor of several products, and its gradient is then the sum over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


def compose(
    U: Tensor,  # (..., m, r)
    V: Tensor,  # (..., n, r)
    inner: Sequence[Tensor] = (),  # each (..., r, r)
) -> Tensor:  # (..., m, n)
    """Return ``U M₁…M_d Vᵀ``, multiplying the inner matrices into the shorter factor."""
    if U.shape[-2] <= V.shape[-2]:
        for M in inner:
            U = U @ M
    else:
        for M in reversed(inner):
            V = V @ M.mT
    return U @ V.mT


def frobenius_norm_squared(
    U: Tensor,  # (..., m, r)
    V: Tensor,  # (..., n, r)
    inner: Sequence[Tensor] = (),  # each (..., r, r)
) -> Tensor:  # (...)
    """Return ‖U M₁…M_d Vᵀ‖² from r×r Gram matrices, or from the product where that is cheaper. Differentiable."""
    if product_is_cheaper(U.shape[-2], V.shape[-2], U.shape[-1], len(inner), products=1):
        return compose(U, V, inner).square().sum(dim=(-2, -1))
    gram = V.mT @ V
    for M in reversed(inner):
        gram = M @ gram @ M.mT
    return ((U.mT @ U) * gram).sum(dim=(-2, -1))


def frobenius_gradients(
    U: Tensor,  # (..., m, r)
    V: Tensor,  # (..., n, r)
    inner: Sequence[Tensor] = (),  # each (..., r, r)
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # like U, like V, like inner
    """Return the gradients of ½‖U M₁…M_d Vᵀ‖² with respect to ``U``, ``V`` and the inner matrices.

    With the Gram matrices ``L_j`` of ``U M₁…M_j`` and ``R_j`` of ``M_{j+1}…M_d Vᵀ`` they are ``U R_0``, ``V L_d`` and
    ``L_{j-1} M_j R_j``: O((m + n) r²) and never the product, unless forming it is cheaper (large ranks).
    """
    if product_is_cheaper(U.shape[-2], V.shape[-2], U.shape[-1], len(inner), products=3):
        return _gradients_from_product(U, V, inner)
    right, left, inner_gradients = gradients_from_grams(U.mT @ U, V.mT @ V, inner)
    return U @ summed_like(right, U), V @ summed_like(left, V), inner_gradients


def gradients_from_grams(
    left: Tensor,  # (..., r, r): Uᵀ U
    right: Tensor,  # (..., r, r): Vᵀ V
    inner: Sequence[Tensor],  # each (..., r, r)
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # (..., r, r), (..., r, r), like inner
    """Return ``R_0``, ``L_d`` and the inner gradients; the gradients of ``U`` and ``V`` are ``U R_0`` and ``V L_d``."""
    rights = [right]
    for M in reversed(inner):
        rights.append(M @ rights[-1] @ M.mT)
    rights.reverse()  # rights[j] is R_j, j = 0..d
    inner_gradients = []
    for M, R in zip(inner, rights[1:], strict=True):
        inner_gradients.append(left @ M @ R)
        left = M.mT @ left @ M
    return rights[0], left, tuple(inner_gradients)


def summed_like(
    tensor: Tensor,  # (..., a, b)
    factor: Tensor,  # (..., m, r), a dimension in front may be 1 where the tensor's is not
) -> Tensor:  # (..., a, b)
    """Return ``tensor`` summed over the products that share ``factor``."""
    shared = [d for d, (t, f) in enumerate(zip(tensor.shape[:-2], factor.shape[:-2], strict=True)) if f == 1 < t]
    return tensor.sum(dim=shared, keepdim=True) if shared else tensor


def product_is_cheaper(m: int, n: int, rank: int, depth: int, products: int) -> bool:
    """Return whether ``products`` multiplications with the full m×n product cost less than Gram matrices do."""
    by_product = products * m * n * rank + depth * min(m, n) * rank * rank
    by_grams = (m + n) * rank * rank * (1 if products == 1 else 2) + 4 * depth * rank**3
    return by_product < by_grams


def _gradients_from_product(U: Tensor, V: Tensor, inner: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    heads, tails = partial_products(U, V, inner)
    W = heads[-1] @ V.mT
    inner_gradients = tuple(head.mT @ W @ tail for head, tail in zip(heads[:-1], tails[1:], strict=True))
    return summed_like(W @ tails[0], U), summed_like(W.mT @ heads[-1], V), inner_gradients


def partial_products(U: Tensor, V: Tensor, inner: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``U M₁…M_j`` and ``V M_dᵀ…M_{j+1}ᵀ`` for j = 0..d; the last head times ``Vᵀ`` is the product."""
    heads, tails = [U], [V]
    for M in inner:
        heads.append(heads[-1] @ M)
    for M in reversed(inner):
        tails.append(tails[-1] @ M.mT)
    return heads, tails[::-1]


def decay_in_backward(weight: Tensor, strength: float) -> Tensor:
    """Return a composed weight whose gradient gets ``strength`` times the weight in the backward pass."""
    return _AddToGradient.apply(weight, strength)


class _AddToGradient(torch.autograd.Function):
    """The identity, which adds ``strength`` times its input to the gradient."""

    apply: ClassVar[Callable[..., Tensor]]  # torch leaves it untyped

    @staticmethod
    def forward(weight: Tensor, strength: float) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient + ctx.strength * weight, None
