"""The singular values of the given weights, for budgets that need them."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from factorized._torch import all_finite
from factorized.attention.cost import attention_spectrum
from factorized.formats.kernel import to_matrix
from factorized.formats.svd import squared_singular_values
from factorized.nn.dense import dense_weight
from factorized.planning.candidate import AttentionCandidate, Selected


@torch.no_grad()
def squared_spectrum(candidate: Selected, *, precise: bool) -> Tensor:  # (full rank,)
    """Return the squared singular values of a weight, summed over its groups; of attention, over forms and heads.

    Those of weights are within 1e-5 of the largest, or within 1e-13 if ``precise``, at twice the time.
    """
    if isinstance(candidate, AttentionCandidate):
        return attention_spectrum(candidate.name, candidate.unit, candidate.forms)
    weight = dense_weight(candidate.module)
    if weight.is_meta:
        raise ValueError(
            f"{candidate.name}: singular values need weights, but the model is on the meta device; "
            'load it, or plan by ratio= or rank_scale= with allocate="uniform"'
        )
    matrix = to_matrix(weight.reshape(candidate.shape.weight_shape), candidate.shape)
    if not all_finite(matrix):
        raise ValueError(f"{candidate.name}: weight holds NaN or infinite values, so it has no singular values")
    return squared_singular_values(matrix, precise=precise).sum(dim=0)


def rank_for_energy(energies: Tensor, share: float) -> int:
    """Return the smallest rank that keeps ``share`` of the squared spectrum."""
    kept = list(accumulate(energies.tolist()))
    return next(rank for rank, energy in enumerate(kept, start=1) if energy >= share * kept[-1])
