"""Products that keep a convolution's outputs, where the taps of its kernel are split between both factors.

Such a product ``Σ_t A_t Bᵀ x_t`` applies one matrix ``B`` to the parts ``x_t`` of a patch that the taps ``t`` of the
other factor see, and then a matrix ``A_t`` for each. The best ``A`` for a ``B`` solves linear equations; ``B`` has too
many numbers for that.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from factorized.formats.calibration import Moment
from factorized.formats.kernel import KernelShape

# Sweeps end once one lowers the error by less than this share of it.
SWEEPS, WORTH_A_SWEEP = 20, 0.003
# Added to the diagonal of equations as a share of its mean: factors may have fewer directions than columns.
RIDGE = 1e-12


def refined_factors(
    U: Tensor,  # (rows, rank), of all groups
    V: Tensor,  # (columns, rank)
    weight: Tensor,  # (out, in/groups, *size), in float64
    moment: Moment,  # regularized
    shape: KernelShape,
) -> tuple[Tensor, Tensor]:  # like U and V
    """Return factors with a smaller output error, ``E‖(W - W')x‖²``.

    A sweep sets ``A`` to the best one, and takes one step with ``B``, as long as is best, along the gradient divided by
    the moments of its inputs and outputs, as if those of different taps were uncorrelated.
    """
    W, C = _by_taps(weight, moment, shape)
    groups, outputs, taps, inputs = W.shape
    rank, C_matrix = U.shape[-1], C.flatten(3, 4).flatten(1, 2)
    A, B = (V, U) if moment.transposed else (U, V)
    A, B = A.reshape(groups, outputs, taps * rank), B.reshape(groups, inputs, rank)

    def seen_through(X: Tensor) -> Tensor:  # (groups, inputs, rank) to (groups, taps, inputs, taps, rank)
        return (C_matrix.view(groups, -1, inputs) @ X).view(groups, taps, inputs, taps, rank)

    target = (W.flatten(2) @ C_matrix).view_as(W)
    scale, singular = _factored(torch.einsum("gtitj->gij", C))
    total, error, seen = (target * W).sum(), None, seen_through(B)
    for _ in range(0 if singular else SWEEPS):
        equations, singular = _factored(torch.einsum("gir,gsitq->gsrtq", B, seen).flatten(3, 4).flatten(1, 2))
        if singular:
            break
        right = (target @ B.unsqueeze(1)).flatten(2)
        A = torch.cholesky_solve(right.mT, equations).mT
        last, error = error, total - (right * A).sum()
        inner = (A.mT @ A).view(groups, taps, rank, taps, rank)
        narrow, singular = _factored(torch.einsum("gtrtq->grq", inner))
        if singular or (last is not None and not error < (1 - WORTH_A_SWEEP) * last):
            break
        gradient = torch.einsum("goti,gotr->gir", target, A.view(groups, outputs, taps, rank))
        gradient = gradient - torch.einsum("gsitq,gtqsr->gir", seen, inner)
        step = torch.cholesky_solve(torch.cholesky_solve(gradient, scale).mT, narrow).mT
        change = seen_through(step)
        curvature = (step * torch.einsum("gsitq,gtqsr->gir", change, inner)).sum((1, 2), keepdim=True)
        length = (gradient * step).sum((1, 2), keepdim=True) / curvature
        length = torch.where(curvature > 0, length, 0)
        B, seen = B + length * step, seen + length.unflatten(1, (1, 1, 1)) * change
    A, B = A.reshape(-1, rank), B.reshape(-1, rank)
    return (B, A) if moment.transposed else (A, B)


def _by_taps(
    weight: Tensor, moment: Moment, shape: KernelShape
) -> tuple[Tensor, Tensor]:  # (groups, outputs, taps, inputs), (groups, taps, inputs, taps, inputs)
    """Return the weight and the moment by the taps of the factor that has the outputs.

    Inputs are those of one tap: channels with the taps of the other factor.
    """
    rows, columns = prod(shape.row_size), prod(shape.column_size)
    W = weight.reshape(shape.groups, -1, weight.shape[1], rows, columns)
    C = moment.sums.unflatten(2, (-1, rows, columns)).unflatten(1, (-1, rows, columns))
    if moment.transposed:  # the first dimension of the weight has the inputs, and U their taps
        return W.permute(0, 2, 4, 1, 3).flatten(3), C.permute(0, 3, 1, 2, 6, 4, 5).flatten(5).flatten(2, 3)
    return W.transpose(2, 3).flatten(3), C.permute(0, 2, 1, 3, 5, 4, 6).flatten(5).flatten(2, 3)


def _factored(matrix: Tensor) -> tuple[Tensor, bool]:  # (groups, n, n)
    """Return Cholesky factors of matrices with a ridge (of the identity for zeros), and whether any has none."""
    mean = matrix.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)  # (groups, 1)
    ridge = torch.where(mean > 0, RIDGE * mean, 1).expand(-1, matrix.shape[1])
    factors, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(ridge))
    return factors, bool(failed.any())
