"""Tucker tensors: HOSVD with HOOI refinement, expansion, squared norm and its gradients.

A tensor (d₁, …, d_n) is a core (R₁, …, R_n) multiplied in every mode by a factor (d_k, R_k) (De Lathauwer et al.,
2000); modes may be kept whole and then have no factor. Every function takes leading batch dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor

from factorized._torch import computable
from factorized.formats.svd import Method, truncated_svd

Factors = Sequence[Tensor | None]  # each (..., d_k, R_k); None for a mode that is kept whole


def reachable_tucker_ranks(ranks: Sequence[int], kept: int) -> tuple[int, ...]:
    """Return the highest ranks, up to the given ones, none of which exceeds the product of the others.

    ``kept`` is the product of the extents that are kept whole. Above that, a factor has columns that add nothing.
    """
    reachable = list(ranks)
    for mode in range(len(reachable)):
        others = prod(reachable[:mode]) * prod(reachable[mode + 1 :]) * kept
        reachable[mode] = min(reachable[mode], others)
    return tuple(reachable)


def raised_tucker_ranks(ranks: Sequence[int], full: Sequence[int], kept: int, place: int) -> tuple[int, ...]:
    """Return low reachable ranks, none below the given ones, with the one at ``place`` (not yet full) one higher."""
    raised = list(ranks)
    raised[place] += 1
    while reachable_tucker_ranks(raised, kept)[place] < raised[place]:
        others = [k for k in range(len(raised)) if k != place and raised[k] < full[k]]
        raised[min(others, key=raised.__getitem__)] += 1
    return tuple(raised)


def hosvd(
    tensor: Tensor,  # (..., d₁, …, d_n)
    ranks: Sequence[int | None],  # n of them; None keeps a mode whole
    refinements: int = 0,
    method: Method = "auto",
) -> tuple[Tensor, list[Tensor | None]]:  # (..., R₁, …, R_n), factors (..., d_k, R_k)
    """Return the higher-order SVD: per mode the leading left singular vectors of the unfolding, and the core.

    The error is at most √n times that of the best Tucker tensor of these ranks, and zero at full rank;
    ``refinements`` rounds of higher-order orthogonal iteration (HOOI) bring it down to a stationary point. Half
    precision is computed and returned in float32.
    """
    tensor = computable(tensor)
    cut = [(mode, rank) for mode, rank in enumerate(ranks) if rank is not None]
    factors: list[Tensor | None] = [None] * len(ranks)
    for mode, rank in cut:
        factors[mode] = _leading_vectors(unfold(tensor, mode, len(ranks)), rank, method)
    for _ in range(refinements):
        for mode, rank in cut:
            others = [None if k == mode else factor for k, factor in enumerate(factors)]
            factors[mode] = _leading_vectors(unfold(project(tensor, others), mode, len(ranks)), rank, method)
    return project(tensor, factors), factors


def tucker_expand(
    core: Tensor,  # (..., R₁, …, R_n)
    factors: Factors,
    order: Sequence[int] | None = None,
) -> Tensor:  # (..., d₁, …, d_n)
    """Return the tensor, multiplying the core by the factors in ``order``, each by one matrix product.

    A mode that is multiplied goes to the end, so that the next one is often in front, where it needs no copy.
    """
    count = len(factors)
    batch = core.dim() - count
    modes = list(range(count))  # in the order in which the dimensions stand
    for mode in order if order is not None else range(count):
        factor = factors[mode]
        if factor is None:
            continue
        place = modes.index(mode)
        modes.append(modes.pop(place))
        others = [core.shape[batch + k] for k in range(count) if k != place]
        if place == 0:
            matrix = core.flatten(batch + 1).mT if count > 1 else core.unsqueeze(batch)
        else:
            matrix = core.movedim(batch + place, -1).flatten(batch, -2)
        product = matrix @ factor.mT  # (..., all others, d)
        core = product.reshape(*core.shape[:batch], *others, factor.shape[-2])
    return core.permute(*range(batch), *[batch + modes.index(mode) for mode in range(count)])


def tucker_norm_squared(
    core: Tensor,  # (..., R₁, …, R_n)
    factors: Factors,
) -> Tensor:  # (...)
    """Return the squared norm of the tensor from the core and the R×R Gram matrices of the factors."""
    seen = tucker_expand(core, _grams(factors))
    return (core * seen).flatten(core.dim() - len(factors)).sum(-1)


def tucker_gradients(
    core: Tensor,  # (..., R₁, …, R_n)
    factors: Factors,
) -> tuple[Tensor, list[Tensor | None]]:  # like core, like factors
    """Return the gradients of half the squared norm with respect to the core and the factors."""
    grams = _grams(factors)
    gradients: list[Tensor | None] = []
    for mode, factor in enumerate(factors):
        if factor is None:
            gradients.append(None)
            continue
        seen = tucker_expand(core, [None if k == mode else gram for k, gram in enumerate(grams)])
        gradients.append(factor @ (unfold(seen, mode, len(factors)) @ unfold(core, mode, len(factors)).mT))
    return tucker_expand(core, grams), gradients


def _grams(factors: Factors) -> list[Tensor | None]:
    return [None if factor is None else factor.mT @ factor for factor in factors]


def project(
    tensor: Tensor,  # (..., d₁, …, d_n)
    factors: Factors,
) -> Tensor:  # (..., R₁, …, R_n)
    """Return the core that orthonormal factors give a tensor."""
    return tucker_expand(tensor, [None if factor is None else factor.mT for factor in factors])


def _leading_vectors(unfolded: Tensor, rank: int, method: Method) -> Tensor:
    if rank > unfolded.shape[-1]:  # fewer columns than vectors asked for: any orthonormal completion will do
        unfolded = unfolded @ unfolded.mT
    return truncated_svd(unfolded, rank, method)[0]


def unfold(
    tensor: Tensor,  # (..., e₁, …, e_modes)
    mode: int,
    modes: int,
) -> Tensor:  # (..., e_mode, all others)
    """Return the tensor as a matrix whose rows are one of its modes."""
    batch = tensor.dim() - modes
    return tensor.movedim(batch + mode, batch).flatten(batch + 1)


def multiply_modes(
    x: Tensor,  # (..., e₁, …, e_m)
    matrices: Sequence[Tensor],  # each (d_k, e_k)
) -> Tensor:  # (..., d₁, …, d_m)
    """Multiply every trailing dimension by its matrix, always the last one, which then moves in front of the others."""
    for matrix in reversed(matrices):
        x = F.linear(x, matrix).movedim(-1, -len(matrices))
    return x
