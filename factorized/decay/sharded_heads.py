"""Frobenius gradients of attention forms whose weights are split by rows (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from factorized._torch import computable, local_range
from factorized.attention.unit import Projection
from factorized.decay.forms import Factor, Form
from factorized.decay.local import as_distributed
from factorized.decay.sharded import sum_over_shards, whole


class ShardedHeads:
    """All attention forms of a sharded model.

    A weight whose rows are the model's side (the output of most families, every input of GPT-2) is left where it is:
    the Gram matrices of its heads are summed over the shards, in one collective for all. The rows of the others are
    head dimensions, and a head's Gram matrix needs all pairs of them: such a weight is gathered whole.
    """

    def __init__(self, members: Sequence[Form]) -> None:
        self.members = list(members)
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in form.factors)

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of every factor's gradient of ½Σ_h‖U_h V_hᵀ‖², in the order of ``factors``."""
        gathered: dict[Tensor, Tensor] = {}
        for factor in self.factors:
            if _projection(factor).dim == 0 and factor.parameter not in gathered:
                gathered[factor.parameter] = whole(factor)
        values = [_by_head(factor, gathered.get(factor.parameter)) for factor in self.factors]  # (heads, long, size)
        grams = [value.mT @ value for value in values]
        split = [i for i, factor in enumerate(self.factors) if _projection(factor).dim == 1]
        sums = sum_over_shards([grams[i] for i in split], [as_distributed(self.factors[i].parameter) for i in split])
        for i, gram in zip(split, sums, strict=True):
            grams[i] = gram
        result = []
        for index, (factor, value) in enumerate(zip(self.factors, values, strict=True)):
            gradient = value @ _for_heads(grams[index ^ 1], value.shape[0])  # left and right stand side by side
            result.append(_own_part(factor, gradient))
        return result


def _projection(factor: Factor) -> Projection:
    return cast(Projection, factor.projection)  # which every factor of attention has


def _by_head(factor: Factor, gathered: Tensor | None) -> Tensor:  # (heads, long or its local rows, size)
    weight = as_distributed(factor.parameter.detach()).to_local() if gathered is None else gathered
    return _projection(factor).view(computable(weight))


def _for_heads(
    grams: Tensor,  # (heads of the partner, size, size)
    heads: int,
) -> Tensor:  # (heads, size, size)
    """Return the partner's Gram matrices for each head: those of query heads summed for the K/V head they share."""
    if grams.shape[0] > heads:
        return grams.unflatten(0, (heads, -1)).sum(dim=1)
    return grams.repeat_interleave(heads // grams.shape[0], dim=0)


def _own_part(
    factor: Factor,
    gradient: Tensor,  # (heads, long or its local rows, size)
) -> Tensor:
    """Return the gradient laid out as the local part of the factor's parameter is."""
    projection = _projection(factor)
    if projection.dim == 1:
        return gradient.transpose(0, 1).flatten(1)
    rows = gradient.mT.flatten(0, 1)  # (heads · size, long)
    first, count = local_range(as_distributed(factor.parameter), 0)
    start, stop = (min(max(row - projection.start, 0), projection.size) for row in (first, first + count))
    return rows[start:stop]
