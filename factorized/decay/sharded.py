"""Frobenius gradients of distributed factors: of those split by rows, only rank × rank matrices travel.

FSDP2 splits factors so, ``fz.ColwiseParallel`` and ``fz.RowwiseParallel`` do, and both together. Factors that are split
by columns are gathered, as the cores of other formats are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from factorized._torch import computable, local_range
from factorized.decay.forms import Factor, Form
from factorized.decay.local import as_distributed, is_by_rows, own_part, projection_part, row_groups


def is_sharded(parameter: Tensor) -> bool:
    """Return whether a parameter is a distributed tensor."""
    return isinstance(parameter, DTensor)


def is_sharded_by_rows(form: Form) -> bool:
    """Return whether every factor of a distributed form is split by rows, or replicated."""
    return all(is_by_rows(as_distributed(factor.parameter)) for factor in form.factors)


class Sharded:
    """All forms whose factors are split by rows or replicated: Gram matrices are summed over the ranks that split them.

    Left to itself, a product of distributed tensors makes partial sums of the full size; here every rank multiplies the
    rows it has, and what travels is the r×r Gram matrix of each factor, in one collective for each mesh dimension, and
    the inner matrices.
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
            rights = [right]  # of M_{j+1}…M_d Vᵀ
            for M in reversed(inner):
                rights.append(M @ rights[-1] @ M.mT)
            rights.reverse()
            middle = []
            for M, R in zip(inner, rights[1:], strict=True):
                middle.append((left @ M @ R).flatten(0, 1))
                left = M.mT @ left @ M
            result.append(_times_gram(form.left, rights[0]))
            result += [
                own_part(gradient, as_distributed(factor.parameter))
                for gradient, factor in zip(middle, form.middle, strict=True)
            ]
            result.append(_times_gram(form.right, left))
        return result


def _summed_grams(factors: Sequence[Factor]) -> list[Tensor]:
    """Return the Gram matrices (groups, r, r) of factors whose rows are spread over ranks."""
    grams = [torch.stack([rows.mT @ rows for rows in _group_rows(factor)]) for factor in factors]
    return sum_over_shards(grams, [as_distributed(factor.parameter) for factor in factors])


def sum_over_shards(
    grams: Sequence[Tensor],  # one of the rows that this rank has of each parameter
    parameters: Sequence[DTensor],
) -> list[Tensor]:
    """Return the Gram matrices of all rows, by one all-reduce for all parameters that the same ranks split.

    What every rank has whole is not summed; what two mesh dimensions split is summed over one, then over the other.
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
            result[i] = summed.view_as(grams[i])
    return result


def _group_rows(factor: Factor) -> list[Tensor]:
    """Return this rank's rows of a factor, by group; groups that this rank has nothing of are empty."""
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
    """Add a whole factor's gradient to ``target``, shaped like its parameter; of a sharded one, this rank's part."""
    factor.part(target).add_(own_gradient(gradient, factor) if is_sharded(factor.parameter) else gradient)


def whole(factor: Factor) -> Tensor:
    """Return a sharded factor's parameter, gathered from all ranks."""
    return as_distributed(factor.parameter.detach()).full_tensor()
