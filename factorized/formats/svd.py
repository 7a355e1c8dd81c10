"""Rank-r singular value decompositions and the paper's spectral initialization (section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from factorized.formats.frobenius import summed_like

Method = Literal["auto", "exact", "randomized"]

# Power iterations of the randomized way, and of matrices more than four times as long as wide, whose spectrum is
# flatter. On Gaussian matrices, the hardest case, they leave the error within 0.5 % of the optimum (docs/log.md has
# the grids that were measured).
POWER_ITERATIONS = 4
POWER_ITERATIONS_LONG = 5
# Below this size an exact decomposition takes milliseconds.
SMALLEST_RANDOMIZED = 256
# Measured: the randomized way is faster as long as its sketch has at most this share of the shorter side as columns.
FASTER_UP_TO = 0.4


def truncated_svd(
    W: Tensor,  # (..., m, n)
    rank: int,
    method: Method = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # (..., m, rank), (..., rank), (..., n, rank)
    """Return the leading ``rank`` singular triplets of ``W``: ``W ≈ U diag(S) Vᵀ``.

    ``"exact"`` is ``torch.linalg.svd``; ``"randomized"`` is shifted subspace iteration, which touches ``W`` through
    matrix products only; ``"auto"`` takes the one that is faster on a CPU. Half types are computed,
    and returned, in float32. The result does not depend on, or advance, torch's random state.
    """
    m, n = W.shape[-2:]
    if not 1 <= rank <= min(m, n):
        raise ValueError(f"rank must be in 1..{min(m, n)} for a {m}x{n} matrix, got {rank}")
    if W.is_meta:
        raise ValueError("a matrix on the meta device has no values to decompose; move the weights to a real device")
    if W.dtype in (torch.float16, torch.bfloat16):
        W = W.float()
    largest = torch.linalg.vector_norm(W, ord=torch.inf, dim=(-2, -1), keepdim=True)  # (..., 1, 1); NaN if any is
    if not torch.isfinite(largest).all():
        raise ValueError("weight holds NaN or infinite values; a singular value decomposition needs finite ones")
    if method == "auto":
        method = "randomized" if _randomized_is_worthwhile(m, n, rank) else "exact"
    if method == "randomized":
        # W Wᵀ must stay within the range of its type, however large or small the weights are.
        scale = largest.clamp(min=torch.finfo(W.dtype).tiny)
        U, S, V = _randomized_svd(W / scale, rank)
        return U, S * scale.squeeze(-1), V
    if method == "exact":
        return _exact_svd(W, rank)
    raise ValueError(f'method must be "auto", "exact" or "randomized", got {method!r}')


def spectral_factors(
    W: Tensor,  # (..., m, n)
    rank: int,
    method: Method = "auto",
) -> tuple[Tensor, Tensor]:  # (..., m, rank), (..., n, rank)
    """Return ``U = Ũ√Σ`` and ``V = Ṽ√Σ`` of the rank-r SVD of ``W``, so that ``U Vᵀ`` is its best rank-r approximation.

    Above full rank (overcomplete layers) the surplus columns of ``U`` are zero and those of ``V`` are random
    directions as long as the smallest kept column: the product stays ``W``, yet every column of ``U``
    receives a gradient, which zeros on both sides would never do. Of a ``W`` that is zero the same holds for all
    columns, with directions of length 1: ``U`` then learns at the rate of a dense weight.
    """
    m, n = W.shape[-2:]
    kept = min(rank, m, n)
    U, S, V = truncated_svd(W, kept, method)
    root = S.sqrt().unsqueeze(-2)
    is_zero = root.amax(dim=-1, keepdim=True) == 0
    U, V = U * root, torch.where(is_zero, _gaussian(n, kept, V) / n**0.5, V * root)
    surplus = rank - kept
    if surplus > 0:
        U = torch.cat([U, U.new_zeros(*U.shape[:-1], surplus)], dim=-1)
        V = torch.cat([V, _surplus_columns(V, surplus)], dim=-1)
    return U.to(W.dtype), V.to(W.dtype)


def truncated_factors(
    U: Tensor,  # (..., m, r)
    V: Tensor,  # (..., n, r)
    inner: Sequence[Tensor],  # each (..., r, r)
    rank: int,
) -> tuple[Tensor, Tensor]:  # (..., m, rank), (..., n, rank)
    """Return the spectral factors of ``U M₁…M_d Vᵀ`` at another rank, from an SVD no larger than the one it has."""
    dtype = U.dtype
    exact = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    (Q, core), (P, T) = torch.linalg.qr(U.to(exact)), torch.linalg.qr(V.to(exact))
    for M in inner:
        core = core @ M.to(exact)
    A, B = spectral_factors(core @ T.mT, rank, "exact")
    return (Q @ A).to(dtype), (P @ B).to(dtype)


def factor_spectrum(
    U: Tensor,  # (..., m, r)
    V: Tensor,  # (..., n, r)
    inner: Sequence[Tensor] = (),  # each (..., r, r)
) -> Tensor:  # (..., min(m, n, r))
    """Return the singular values of ``U M₁…M_d Vᵀ``, largest first, from an SVD no larger than the rank."""
    core = torch.linalg.qr(U).R
    for M in inner:
        core = core @ M
    return torch.linalg.svdvals(core @ torch.linalg.qr(V).R.mT)


def nuclear_gradients(
    U: Tensor,  # (..., m, r)
    V: Tensor,  # (..., n, r)
    inner: Sequence[Tensor] = (),  # each (..., r, r)
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # like U, like V, like inner
    """Return the gradients of the nuclear norm ‖U M₁…M_d Vᵀ‖_* with respect to ``U``, ``V`` and the inner matrices.

    That of the product is ``A Bᵀ`` from its SVD ``A Σ Bᵀ``, taken where singular values are zero as zero.
    """
    (Q, R), (P, T) = torch.linalg.qr(U), torch.linalg.qr(V)
    heads, tails = [R], [T]  # R M₁…M_j and T M_dᵀ…M_{j+1}ᵀ
    for M in inner:
        heads.append(heads[-1] @ M)
    for M in reversed(inner):
        tails.append(tails[-1] @ M.mT)
    tails.reverse()
    A, S, Bh = torch.linalg.svd(heads[-1] @ T.mT, full_matrices=False)
    tolerance = S[..., :1] * (max(U.shape[-2:]) * torch.finfo(S.dtype).eps)
    direction = (A * (tolerance < S).unsqueeze(-2)) @ Bh
    d_inner = tuple(head.mT @ direction @ tail for head, tail in zip(heads[:-1], tails[1:], strict=True))
    return summed_like(Q @ (direction @ tails[0]), U), summed_like(P @ (direction.mT @ heads[-1]), V), d_inner


def _randomized_is_worthwhile(m: int, n: int, rank: int) -> bool:
    smallest = min(m, n)
    return smallest >= SMALLEST_RANDOMIZED and _sketch_width(rank, smallest) <= FASTER_UP_TO * smallest


def _sketch_width(rank: int, smallest: int) -> int:
    return min(rank + max(8, rank // 8), smallest)


def _exact_svd(W: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    if W.shape[-2] < W.shape[-1]:  # LAPACK takes up to three times as long for a wide matrix as for its transpose
        V, S, U = _exact_svd(W.mT, rank)
        return U, S, V
    try:
        U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    except LinAlgError:  # divide and conquer can fail to converge in float32
        U, S, Vh = (part.to(W.dtype) for part in torch.linalg.svd(W.double(), full_matrices=False))
    return U[..., :rank], S[..., :rank], Vh[..., :rank, :].mT


def _randomized_svd(
    W: Tensor,  # (..., m, n)
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Subspace iteration on ``W Wᵀ - shift·I``.

    The shift is half of the smallest eigenvalue seen in the subspace, which is never more than half of the true one:
    it damps the unwanted part of the spectrum faster than plain power iterations, at no extra product with ``W``.
    """
    m, n = W.shape[-2:]
    width = _sketch_width(rank, min(m, n))
    Q = torch.linalg.qr(W @ _gaussian(n, width, W)).Q
    shift = W.new_zeros(*W.shape[:-2], 1, 1)
    for _ in range(POWER_ITERATIONS_LONG if max(m, n) > 4 * min(m, n) else POWER_ITERATIONS):
        Q, R = torch.linalg.qr(W @ (W.mT @ Q) - shift * Q)
        smallest = torch.linalg.svdvals(R)[..., -1, None, None]
        shift = torch.maximum(shift, (smallest + shift) / 2)
    V, S, Wh = torch.linalg.svd(W.mT @ Q, full_matrices=False)
    return Q @ Wh.mT[..., :rank], S[..., :rank], V[..., :rank]


def _gaussian(rows: int, columns: int, like: Tensor) -> Tensor:
    # A generator of its own: every process of a distributed job must draw the same factors, and the
    # user's random state must not move. It draws on the CPU so that devices agree.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator, dtype=like.dtype, device="cpu").to(like.device)


def _surplus_columns(
    V: Tensor,  # (..., n, kept)
    surplus: int,
) -> Tensor:  # (..., n, surplus)
    n = V.shape[-2]
    smallest = V.norm(dim=-2, keepdim=True).amin(dim=-1, keepdim=True).clamp(min=1e-4)
    return _gaussian(n, surplus, V) * (smallest / n**0.5)
