"""Rank-r singular value decompositions and the paper's spectral initialization (section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not exported for type checkers

from factorized._checks import check_choice
from factorized._torch import computable, full_precision
from factorized.formats.frobenius import partial_products, summed_like

Method = Literal["auto", "exact", "gram", "randomized"]

# Below these sizes of the shorter side, an exact decomposition takes a millisecond or so.
SMALLEST_GRAM, SMALLEST_RANDOMIZED = 128, 256
# Above this share of full rank, so little of the spectrum is cut that a float32 Gram matrix may not resolve it.
GRAM_UP_TO = 0.75
# From this size on, a Gram matrix is computed in blocks, those above the diagonal left out.
SMALLEST_HALVED = 512
# The rounding of the Gram matrix may raise the squared error by at most this share; else the decomposition is exact.
# Measured errors are ten thousand times below this bound.
HARMLESS = 0.01
# Eigenvectors of the Gram matrix are rotated into singular vectors if the smallest kept eigenvalue is below this share
# of the largest. Above it, they are singular vectors to 1e-5.
RESOLVED = 0.01
# Iterations of the randomized SVD, and the end of the damped interval as a multiple of the smallest eigenvalue seen. On
# Gaussian matrices, the hardest case, they leave the error within 0.4 % of the optimum (docs/log.md has the grids that
# were measured).
ITERATIONS, CUT = 3, 1.4
# Times of an eigendecomposition and of the randomized SVD on a CPU, in matrix products of the same size.
EIGENDECOMPOSITION, RANDOMIZED = 6.5, 20
# The randomized SVD is used where it is at least this many times faster than the Gram matrix.
WORTHWHILE = 2
# Weights that are larger, or smaller than its inverse, are scaled: their squares must stay within the range of float32.
IN_RANGE = 1e10


@full_precision
def truncated_svd(
    W: Tensor,  # (..., m, n)
    rank: int,
    method: Method = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # (..., m, rank), (..., rank), (..., n, rank)
    """Return the leading ``rank`` singular triplets of ``W``: ``W ≈ U diag(S) Vᵀ``.

    ``"exact"`` is ``torch.linalg.svd``. ``"gram"`` finds the singular vectors of the shorter side as eigenvectors of
    ``WᵀW``, and is exact where the rounding of that matrix could raise the error noticeably. ``"randomized"`` is
    subspace iteration, which touches ``W`` through matrix products only: its error ``‖W - U diag(S) Vᵀ‖`` is close to
    the optimum, but on flat spectra its singular vectors are not those of ``W``. ``"auto"`` takes the faster one for
    these sizes, and ``"exact"`` for float64 in place of ``"gram"``. Half precision is computed and returned in float32.
    The result does not depend on, or advance, torch's random state.
    """
    m, n = W.shape[-2:]
    if not 1 <= rank <= min(m, n):
        raise ValueError(f"rank must be in 1..{min(m, n)} for a {m}x{n} matrix, got {rank}")
    if W.is_meta:
        raise ValueError("a matrix on the meta device has no values to decompose; move the weights to a real device")
    W = computable(W)
    largest = _largest(W)
    if not torch.isfinite(largest).all():
        raise ValueError("weight holds NaN or infinite values; a singular value decomposition needs finite ones")
    if method == "auto":
        method = _fastest(m, n, rank, W.dtype)
    if method == "exact":
        return _exact_svd(W, rank)
    check_choice("method", method, ("auto", "exact", *METHODS))
    tall, scale = _tall(W, largest)
    long, S, short = METHODS[method](tall, rank)
    return (long, S * scale, short) if m >= n else (short, S * scale, long)


def method_of(exact: bool) -> Method:
    """Return the method for ``exact=`` of a format's ``decompose``."""
    return "exact" if exact else "auto"


@full_precision
def squared_singular_values(
    W: Tensor,  # (..., m, n)
    *,
    precise: bool,
) -> Tensor:  # (..., min(m, n)), in float64
    """Return the squared singular values of ``W``, largest first, to 1e-13 of the largest if ``precise``, else to 1e-5.

    Those of large matrices in float32 are the eigenvalues of ``WᵀW``, computed in float64 if ``precise``.
    """
    W = computable(W)
    if W.dtype == torch.float64 or min(W.shape[-2:]) < SMALLEST_GRAM:
        return torch.linalg.svdvals(W).double().square()
    tall, scale = _tall(W, _largest(W))
    energies = torch.linalg.eigvalsh(_gram(tall.double() if precise else tall))  # ascending
    return energies.double().clamp(min=0).flip(-1) * scale.double().square()


def spectral_factors(
    W: Tensor,  # (..., m, n)
    rank: int,
    method: Method = "auto",
) -> tuple[Tensor, Tensor]:  # (..., m, rank), (..., n, rank)
    """Return ``U = Ũ√Σ`` and ``V = Ṽ√Σ`` of the rank-r SVD of ``W``, so that ``U Vᵀ`` is its best rank-r approximation.

    Above full rank (overcomplete layers) the surplus columns of ``U`` are zero and those of ``V`` are random
    directions as long as the smallest kept column: the product stays ``W``, yet every column of ``U``
    receives a gradient, which zeros on both sides would never do. If ``W`` is zero, the same holds for all columns,
    with directions of length 1: ``U`` then learns at the rate of a dense weight. Rows and columns of zeros stay zero.
    """
    m, n = W.shape[-2:]
    kept = min(rank, m, n)
    U, S, V = truncated_svd(W, kept, method)
    root = S.sqrt().unsqueeze(-2)
    U, V = _zero_like(W, U * root), _zero_like(W.mT, V * root)
    is_zero = root.amax(dim=-1, keepdim=True) == 0
    if is_zero.any():
        V = torch.where(is_zero, _gaussian(n, kept, V) / n**0.5, V)
    surplus = rank - kept
    if surplus > 0:
        U = torch.cat([U, U.new_zeros(*U.shape[:-1], surplus)], dim=-1)
        V = torch.cat([V, _surplus_columns(V, surplus)], dim=-1)
    return U.to(W.dtype), V.to(W.dtype)


def truncated_factors(
    U: Tensor,  # (..., m, r)
    V: Tensor,  # (..., n, r)
    rank: int,
    inner: Sequence[Tensor] = (),  # each (..., r, r)
) -> tuple[Tensor, Tensor]:  # (..., m, rank), (..., n, rank)
    """Return the spectral factors of ``U M₁…M_d Vᵀ`` at this rank, from an SVD no larger than its present rank.

    Half precision is computed in float32.
    """
    (Q, core), (P, T) = torch.linalg.qr(computable(U)), torch.linalg.qr(computable(V))
    for M in inner:
        core = core @ computable(M)
    A, B = spectral_factors(core @ T.mT, rank, "exact")
    return _zero_like(U, Q @ A).to(U.dtype), _zero_like(V, P @ B).to(V.dtype)


def _zero_like(
    matrix: Tensor,  # (..., m, n)
    factor: Tensor,  # (..., m, r)
) -> Tensor:  # like factor
    """Return ``factor`` with zeros for the rounding errors in rows that are zero in ``matrix``.

    A table of embeddings has such a row for padding. Adaptive optimizers would blow up rounding errors to their
    learning rate. If all rows are zero, the factor holds the directions that let the product learn, and stays.
    """
    rows = matrix.any(dim=-1, keepdim=True)
    return factor * (rows | ~rows.any(dim=-2, keepdim=True))


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

    With respect to the product it is ``A Bᵀ``, from the SVD ``A Σ Bᵀ`` without directions of zero singular values.
    """
    (Q, R), (P, T) = torch.linalg.qr(U), torch.linalg.qr(V)
    heads, tails = partial_products(R, T, inner)
    A, S, Bh = torch.linalg.svd(heads[-1] @ T.mT, full_matrices=False)
    tolerance = S[..., :1] * (max(U.shape[-2:]) * torch.finfo(S.dtype).eps)
    direction = (A * (tolerance < S).unsqueeze(-2)) @ Bh
    d_inner = tuple(head.mT @ direction @ tail for head, tail in zip(heads[:-1], tails[1:], strict=True))
    return summed_like(Q @ (direction @ tails[0]), U), summed_like(P @ (direction.mT @ heads[-1]), V), d_inner


def _fastest(m: int, n: int, rank: int, dtype: torch.dtype) -> Method:
    long, short = max(m, n), min(m, n)
    gram = long * short**2 + EIGENDECOMPOSITION * short**3
    randomized = RANDOMIZED * long * short * _sketch_width(rank, short)
    if short >= SMALLEST_RANDOMIZED and WORTHWHILE * randomized <= gram:
        return "randomized"
    suits = dtype == torch.float32 and short >= SMALLEST_GRAM and rank <= GRAM_UP_TO * short
    return "gram" if suits else "exact"


def _largest(W: Tensor) -> Tensor:  # (...)
    """Return the largest absolute entry of every matrix; NaN if it holds one."""
    return torch.maximum(W.amax(dim=(-2, -1)), -W.amin(dim=(-2, -1)))


def _tall(
    W: Tensor,  # (..., m, n)
    largest: Tensor,  # (...)
) -> tuple[Tensor, Tensor]:  # (..., long, short), (..., 1)
    """Return matrices whose Gram matrix is precise and within range, and the scales they were divided by."""
    tall = W if W.shape[-2] >= W.shape[-1] else W.mT
    extreme = (largest < 1 / IN_RANGE) | (largest > IN_RANGE)
    exponent = torch.frexp(largest.clamp(min=torch.finfo(W.dtype).tiny)).exponent - 1
    scale = torch.ldexp(torch.ones_like(largest), torch.where(extreme, exponent, 0)).unsqueeze(-1)  # rounds nothing
    return tall / scale.unsqueeze(-1) if extreme.any() else tall, scale


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


def _gram_svd(
    W: Tensor,  # (..., m, n), m >= n
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the eigenvectors ``V`` of ``WᵀW`` for right singular vectors; ``W V`` gives the rest.

    Rounding adds a matrix of norm ε‖W‖² to ``WᵀW``. The eigenvectors of the perturbed matrix lose at most 2·rank·ε‖W‖²
    of the best ``‖W V‖²``: that must be small against what is cut.
    """
    try:
        energies, vectors = torch.linalg.eigh(_gram(W))  # ascending
    except LinAlgError:
        return _exact_svd(W, rank)
    rounding = 2 * rank * torch.finfo(W.dtype).eps * energies[..., -1]
    unresolved = rounding >= HARMLESS * energies[..., :-rank].clamp(min=0).sum(-1)  # (...)
    V = vectors[..., -rank:].flip(-1)
    US = W @ V
    if (energies[..., -rank] < RESOLVED * energies[..., -1]).any():
        small = US.double()
        rotation = torch.linalg.eigh(small.mT @ small).eigenvectors.flip(-1).to(V.dtype)
        US, V = US @ rotation, V @ rotation
    S = torch.linalg.vector_norm(US, dim=-2)
    U = US / S.unsqueeze(-2)
    if unresolved.any():
        U[unresolved], S[unresolved], V[unresolved] = _exact_svd(W[unresolved], rank)
    return U, S, V


def _gram(
    W: Tensor,  # (..., m, n)
) -> Tensor:  # (..., n, n)
    """Return ``WᵀW``, or only its lower triangle where that is faster."""
    n = W.shape[-1]
    if n < SMALLEST_HALVED:
        return W.mT @ W
    half = n // 2
    left, right = W[..., :half], W[..., half:]
    G = W.new_zeros(*W.shape[:-2], n, n)
    G[..., :half, :half] = _gram(left)
    G[..., half:, :half] = right.mT @ left
    G[..., half:, half:] = _gram(right)
    return G


def _randomized_svd(
    W: Tensor,  # (..., m, n), m >= n
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Subspace iteration on ``WᵀW - shift·I``, with other shifts in turn.

    The shifts are the roots of a Chebyshev polynomial on the interval from 0 to about the smallest eigenvalue wanted:
    of all polynomials of that degree it damps the unwanted part of the spectrum most. They cost no extra product.
    """
    width = _sketch_width(rank, W.shape[-1])
    Q = torch.linalg.qr(W.mT @ _gaussian(W.shape[-2], width, W)).Q
    Q, R = torch.linalg.qr(W.mT @ (W @ Q))
    cut = CUT * torch.linalg.svdvals(R)[..., -1, None, None]
    for k in range(ITERATIONS):
        shift = cut * (1 + cos(pi * (2 * k + 1) / (2 * ITERATIONS))) / 2
        Q = torch.linalg.qr(W.mT @ (W @ Q) - shift * Q).Q
    U, S, Vh = torch.linalg.svd(W @ Q, full_matrices=False)
    return U[..., :rank], S[..., :rank], Q @ Vh[..., :rank, :].mT


METHODS = {"gram": _gram_svd, "randomized": _randomized_svd}


def _gaussian(rows: int, columns: int, like: Tensor) -> Tensor:
    # A separate generator: every process of a distributed job must draw the same factors, and the
    # user's random state must not advance. It draws on the CPU so that devices agree.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator, dtype=like.dtype, device="cpu").to(like.device)


def _surplus_columns(
    V: Tensor,  # (..., n, kept)
    surplus: int,
) -> Tensor:  # (..., n, surplus)
    n = V.shape[-2]
    smallest = V.norm(dim=-2, keepdim=True).amin(dim=-1, keepdim=True).clamp(min=1e-4)
    return _gaussian(n, surplus, V) * (smallest / n**0.5)
