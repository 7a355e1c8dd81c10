"""Spectral initialization of many layers at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from factorized.layers.base import FactorizedLayer
from factorized.maths.kernel import to_matrix
from factorized.maths.spectral import spectral_factors

Factors = tuple[Tensor, Tensor]  # (groups·rows, rank), (groups·columns, rank)
# Weights of one shape are decomposed together, as long as their stack stays below this many entries.
STACKED_ENTRIES = 2**25


@torch.no_grad()
def decompose_all(weights: Mapping[str, Tensor], layers: Mapping[str, FactorizedLayer]) -> dict[str, Factors]:
    """Return the spectral factors of every weight for the layer of the same name; weights of one shape in a batch."""
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name}: weight holds NaN or infinite values; nothing was changed")
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, weight in weights.items():
        alike.setdefault((layers[name].shape, layers[name].rank, weight.dtype, weight.device), []).append(name)
    factors: dict[str, Factors] = {}
    for names in alike.values():
        shape, rank = layers[names[0]].shape, layers[names[0]].rank
        size = max(1, STACKED_ENTRIES // shape.numel)
        for batch in (names[start : start + size] for start in range(0, len(names), size)):
            stack = torch.stack([to_matrix(weights[name], shape) for name in batch])
            U, V = spectral_factors(stack, rank)  # (batch, groups, rows or columns, rank)
            factors.update(zip(batch, zip(U.flatten(1, 2), V.flatten(1, 2), strict=True), strict=True))
    return factors
