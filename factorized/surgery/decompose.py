"""Spectral initialization of many layers at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from factorized._torch import all_finite, full_precision
from factorized.nn.layer import FactorizedLayer
from factorized.surgery.progress import Count

# Weights of one shape are decomposed together while their stack stays below this many entries. On a CPU, large weights
# gain nothing from it.
STACKED_ENTRIES, STACKED_ON_CPU = 2**25, 2**20


def refuse_not_finite(weights: Mapping[str, Tensor]) -> None:
    """Raise with the name of the first weight that holds NaN or infinite values."""
    for name, weight in weights.items():
        if not all_finite(weight):
            raise ValueError(f"{name or 'the model'}: weight holds NaN or infinite values; nothing was changed")


@full_precision
@torch.no_grad()
def decompose_all(
    weights: Mapping[str, Tensor], layers: Mapping[str, FactorizedLayer], count: Count, *, exact: bool = False
) -> dict[str, tuple[Tensor, ...]]:
    """Return the factors of every weight for the layer of the same name, decomposing equal shapes in batches."""
    refuse_not_finite(weights)
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, weight in weights.items():
        alike.setdefault((layers[name].format, weight.dtype, weight.device), []).append(name)
    factors: dict[str, tuple[Tensor, ...]] = {}
    for names in alike.values():
        layer = layers[names[0]]
        on_cpu = weights[names[0]].device.type == "cpu"
        size = max(1, (STACKED_ON_CPU if on_cpu else STACKED_ENTRIES) // layer.shape.numel)
        for batch in (names[start : start + size] for start in range(0, len(names), size)):
            shaped = [weights[name].reshape(layer.shape.weight_shape) for name in batch]
            stacked = torch.stack(shaped) if len(shaped) > 1 else shaped[0].unsqueeze(0)
            stacks = layer.format.decompose(stacked, exact=exact)
            factors.update(zip(batch, zip(*stacks, strict=True), strict=True))
            count.add(len(batch))
    return factors
