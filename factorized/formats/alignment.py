"""Padding of ranks to multiples of eight, for GPUs: zeros are added to a chain of linears while it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor


def gains_from_alignment(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether a chain of linears runs faster between sizes that are multiples of eight.

    GPUs multiply rows that begin at multiples of 16 bytes faster. A compiled program casts the weights anyway in one
    kernel each, which can pad them; elsewhere padding would take kernels of its own.
    """
    return x.is_cuda and torch.compiler.is_compiling() and not isinstance(weights[0], DTensor)


def aligned(
    weights: Sequence[Tensor],  # each (outputs, inputs), in the order they are applied
) -> list[Tensor]:
    """Return the weights with zeros added between them, up to the next multiple of eight: the same function."""
    last = len(weights) - 1
    added = [
        (0, -weight.shape[1] % 8 if place > 0 else 0, 0, -weight.shape[0] % 8 if place < last else 0)
        for place, weight in enumerate(weights)
    ]
    return [F.pad(weight, zeros) if any(zeros) else weight for weight, zeros in zip(weights, added, strict=True)]
