"""Frobenius gradients of distributed factors: those split by rows communicate only rank × rank matrices.

FSDP2, ``fz.ColwiseParallel`` and ``fz.RowwiseParallel`` split factors by rows, alone or together. Factors split by
columns are gathered, and so are the cores of other formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from factorized._torch import computable, local_range, split_order
from factorized.attention.unit import Projection
from factorized.decay.forms import Factor, Form, is_attention
from factorized.decay.local import as_distributed, is_by_rows, own_part, projection_part, row_groups
from factorized.formats.frobenius import gradients_from_grams


def is_sharded(parameter: Tensor) -> bool:
    """Return whether a parameter is a distributed tensor."""
    return isinstance(parameter, DTensor)


def is_sharded_by_rows(form: Form) -> bool:
    """Return whether every factor of a distributed form is split by rows or replicated, or, in attention, by heads."""
    axis = heads_axis(form) if is_attention(form) else None
    return all(is_by_rows(as_distributed(factor.parameter), axis) for factor in form.factors)


class Sharded:
    """All forms whose factors are split by rows or replicated: Gram matrices are summed over the ranks that split them.

    DTensor alone would make partial sums of the full size. Here every rank multiplies the rows it has, and only the r×r
    Gram matrix of each factor is communicated, in one collective for each mesh dimension, and the inner matrices.
    """

    def __init__(self, members: Sequence[Form]) -> None:
        self.members = list(members)
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in form.factors)

    def gradients(self) -> list[Tensor]:
        """Return this rank's rows of every factor's gradient of ½‖U M₁…M_d Vᵀ‖², in the order of ``factors``."""
        ends = [factor for form in self.members for factor in (form.left, form.right)]
        grams = _summed_grams(ends)
        result = []
        for index, form in enumerate(self.members):
            left, right = grams[2 * index], grams[2 * index + 1]  # (groups, r, r)
            inner = [computable(whole(factor)).unflatten(0, (left.shape[0], -1)) for factor in form.middle]
            right, left, middle = gradients_from_grams(left, right, inner)
            result.append(_times_gram(form.left, right))
            for factor, gradient in zip(form.middle, middle, strict=True):
                result.append(own_part(gradient.flatten(0, 1), as_distributed(factor.parameter)))
            result.append(_times_gram(form.right, left))
        return result


class ShardedHeads:
    """All attention forms whose weights are split by rows, by heads, or replicated.

    A weight whose rows are the model's side (the output of most families, every input of GPT-2) stays where it is: the
    Gram matrices of its heads are summed over the shards, in one collective for all. The rows of the others are head
    dimensions, and a head's Gram matrix needs all pairs of them, so such a weight is gathered. Where tensor parallelism
    gives every rank its own heads, each rank gathers only those.
    """

    def __init__(self, members: Sequence[Form]) -> None:
        self.members = list(members)
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in form.factors)
        self.axes = [heads_axis(form) for form in members for _ in form.factors]

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of every factor's gradient of ½Σ_h‖U_h V_hᵀ‖², in the order of ``factors``."""
        gathered: dict[tuple[Tensor, int | None], Tensor] = {}
        for factor, axis in zip(self.factors, self.axes, strict=True):
            if _projection(factor).dim == 0 and (factor.parameter, axis) not in gathered:
                gathered[factor.parameter, axis] = _gathered(factor, axis)
        placed = list(zip(self.factors, self.axes, strict=True))
        values = [_by_head(factor, axis, gathered.get((factor.parameter, axis))) for factor, axis in placed]
        grams = [value.mT @ value for value in values]  # (heads, size, size)
        split = [i for i, factor in enumerate(self.factors) if _projection(factor).dim == 1]
        parameters = [as_distributed(self.factors[i].parameter) for i in split]
        sums = _sum_over_shards([grams[i] for i in split], parameters)
        for i, gram in zip(split, sums, strict=True):
            grams[i] = gram
        result = []
        for index, ((factor, axis), value) in enumerate(zip(placed, values, strict=True)):
            gradient = value @ _for_heads(grams[index ^ 1], value.shape[0])  # left and right are next to each other
            result.append(_own_part(factor, axis, gradient))
        return result


def heads_axis(form: Form) -> int | None:
    """Return the mesh dimension that gives every rank whole heads of an attention form, if there is one."""
    weights = [as_distributed(factor.parameter) for factor in form.factors]
    for axis in range(weights[0].device_mesh.ndim):
        if all(_splits_heads(_projection(factor), axis) for factor in form.factors):
            return axis
    return None


def _splits_heads(projection: Projection, axis: int) -> bool:
    weight = as_distributed(projection.weight)
    is_all = projection.size == weight.shape[projection.dim]  # ranks would have mixed parts of a packed weight
    order = split_order(weight, projection.dim)
    return (
        is_all
        and order[:1] == [axis]
        and len(order) <= 2  # by the heads, and by FSDP2 after them
        and projection.heads % weight.device_mesh.size(axis) == 0
    )


def _projection(factor: Factor) -> Projection:
    return cast(Projection, factor.projection)  # every factor of attention has one


def _gathered(factor: Factor, axis: int | None) -> Tensor:
    """Return all rows of a weight that is split by rows, or all rows of the heads that ``axis`` gives to this rank."""
    if axis is None:
        return whole(factor)
    weight = as_distributed(factor.parameter.detach())
    mesh, rows = weight.device_mesh, weight.to_local()
    for other in split_order(weight, 0)[1:]:
        length = weight.shape[0] // mesh.size(axis)
        own = rows.new_zeros(-(-length // mesh.size(other)), weight.shape[1])
        own[: len(rows)] = rows
        parts = [torch.empty_like(own) for _ in range(mesh.size(other))]
        dist.all_gather(parts, own, group=mesh.get_group(other))
        rows = torch.cat(parts)[:length]
    return rows


def _by_head(factor: Factor, axis: int | None, gathered: Tensor | None) -> Tensor:
    # (this rank's heads, long or its local rows, size)
    weight = as_distributed(factor.parameter.detach())
    ranks = 1 if axis is None else weight.device_mesh.size(axis)
    projection = replace(_projection(factor), heads=_projection(factor).heads // ranks)
    return projection.view(computable(weight.to_local() if gathered is None else gathered))


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
    axis: int | None,
    gradient: Tensor,  # (this rank's heads, long or its local rows, size)
) -> Tensor:
    """Return the gradient in the layout of the local part of the factor's parameter."""
    projection, weight = _projection(factor), as_distributed(factor.parameter)
    if projection.dim == 1:
        return gradient.transpose(0, 1).flatten(1)
    rows = gradient.mT.flatten(0, 1)  # (heads · size, long)
    begin = projection.start if axis is None else len(rows) * weight.device_mesh.get_local_rank(axis)
    first, count = local_range(weight, 0)
    start, stop = (min(max(row - begin, 0), len(rows)) for row in (first, first + count))
    return rows[start:stop]


def _summed_grams(factors: Sequence[Factor]) -> list[Tensor]:
    """Return the Gram matrices (groups, r, r) of factors whose rows are spread over ranks."""
    grams = [torch.stack([rows.mT @ rows for rows in _group_rows(factor)]) for factor in factors]
    return _sum_over_shards(grams, [as_distributed(factor.parameter) for factor in factors])


def _sum_over_shards(
    grams: Sequence[Tensor],  # of this rank's rows, one for each parameter
    parameters: Sequence[DTensor],
) -> list[Tensor]:
    """Return the Gram matrices of all rows, by one all-reduce for all parameters that the same ranks split.

    Replicated parameters are not summed; those split by two mesh dimensions are summed over one, then the other.
    """
    result = list(grams)
    split: dict[dist.ProcessGroup, list[int]] = {}
    for index, parameter in enumerate(parameters):
        for group in row_groups(parameter):
            split.setdefault(group, []).append(index)
    for group, indices in split.items():
        flat = torch.cat([result[i].flatten() for i in indices])
        dist.all_reduce(flat, group=group)
        for i, summed in zip(indices, flat.split([grams[i].numel() for i in indices]), strict=True):
            result[i] = summed.view_as(grams[i]).to(grams[i].dtype)  # which others in the sum may have widened
    return result


def _group_rows(factor: Factor) -> list[Tensor]:
    """Return this rank's rows of a factor, by group; groups of which this rank has no rows are empty."""
    local, start = computable(factor.value), local_range(as_distributed(factor.parameter), 0)[0]
    size = factor.parameter.shape[0] // factor.batch
    rows = []
    for group in range(factor.batch):
        first = min(max(group * size - start, 0), local.shape[0])
        last = min(max((group + 1) * size - start, 0), local.shape[0])
        rows.append(local[first:last])
    return rows


def _times_gram(factor: Factor, gram: Tensor) -> Tensor:  # (local rows, r)
    return torch.cat([rows @ of_group for rows, of_group in zip(_group_rows(factor), gram, strict=True)])


def own_gradient(
    gradient: Tensor,  # like the whole factor
    factor: Factor,
) -> Tensor:
    """Return the part of a distributed factor's gradient that this rank has, shaped as ``factor.part`` is."""
    parameter = as_distributed(factor.parameter)
    shaped = gradient.new_zeros(parameter.shape)
    factor.view(shaped).copy_(gradient)
    own = own_part(shaped, parameter)
    return own if factor.projection is None else projection_part(factor.projection, own, parameter)


def add_whole(
    target: Tensor,
    factor: Factor,
    gradient: Tensor,  # like the whole factor
) -> None:
    """Add a whole factor's gradient to ``target``, shaped like its parameter; for a sharded one, this rank's part."""
    factor.part(target).add_(own_gradient(gradient, factor) if is_sharded(factor.parameter) else gradient)


def whole(factor: Factor) -> Tensor:
    """Return a sharded factor's parameter, gathered from all ranks."""
    return as_distributed(factor.parameter.detach()).full_tensor()
