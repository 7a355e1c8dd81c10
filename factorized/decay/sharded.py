"""Frobenius gradients of factors that are sharded by rows (FSDP2): only rank × rank matrices are communicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from factorized.decay.forms import Factor, Form
from factorized.decay.local import first_row
from factorized.maths.frobenius import computable


def is_sharded(parameter: Tensor) -> bool:
    """Say whether a parameter is a distributed tensor."""
    return isinstance(parameter, DTensor)


class Sharded:
    """All sharded forms of a model: their Gram matrices are summed over the shards in one collective.

    Left to itself, a product of distributed tensors makes partial sums of the full size; here every rank multiplies the
    rows it has, and what travels is the r×r Gram matrix of each factor and the inner matrices.
    """

    def __init__(self, members: Sequence[Form]) -> None:
        self.members = list(members)
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in form.factors)
        check_sharded_alike(members)

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
            result += [own_rows(gradient, factor) for gradient, factor in zip(middle, form.middle, strict=True)]
            result.append(_times_gram(form.right, left))
        return result


def _summed_grams(factors: Sequence[Factor]) -> list[Tensor]:
    """Return the Gram matrices (groups, r, r) of factors whose rows are spread over ranks, by one all-reduce."""
    local = [torch.stack([rows.mT @ rows for rows in _group_rows(factor)]) for factor in factors]
    flat = torch.cat([gram.flatten() for gram in local])
    dist.all_reduce(flat, group=shard_group(factors[0].parameter))
    parts = flat.split([gram.numel() for gram in local])
    return [part.view_as(gram) for part, gram in zip(parts, local, strict=True)]


def _group_rows(factor: Factor) -> list[Tensor]:
    """Return this rank's rows of a factor, by group; groups that this rank has nothing of are empty."""
    local, start = computable(factor.value), first_row(factor.parameter)
    size = factor.parameter.shape[0] // factor.batch
    rows = []
    for group in range(factor.batch):
        first = min(max(group * size - start, 0), local.shape[0])
        last = min(max((group + 1) * size - start, 0), local.shape[0])
        rows.append(local[first:last])
    return rows


def _times_gram(factor: Factor, gram: Tensor) -> Tensor:  # (local rows, r)
    return torch.cat([rows @ of_group for rows, of_group in zip(_group_rows(factor), gram, strict=True)])


def own_rows(gradient: Tensor, factor: Factor) -> Tensor:
    """Return the rows of a whole gradient that this rank has of the factor."""
    start = first_row(factor.parameter)
    return gradient[start : start + factor.value.shape[0]]


def add_whole(
    target: Tensor,
    factor: Factor,
    gradient: Tensor,  # like the whole factor
) -> None:
    """Add a whole factor's gradient to ``target``, shaped like its parameter; of a sharded one, this rank's rows."""
    if not is_sharded(factor.parameter):
        factor.part(target).add_(gradient)
        return
    shard_group(factor.parameter)  # raises where it is not sharded by rows
    shaped = gradient.new_zeros(factor.parameter.shape)
    factor.view(shaped).copy_(gradient)
    start, local = first_row(factor.parameter), target.to_local()  # type: ignore[attr-defined]
    local.add_(shaped[start : start + local.shape[0]])


def whole(factor: Factor) -> Tensor:
    """Return a sharded factor's parameter, gathered from all ranks."""
    return factor.parameter.detach().full_tensor()  # type: ignore[attr-defined]


def check_sharded_alike(members: Sequence[Form]) -> None:
    """Raise unless all factors of these forms are sharded, over the same ranks: what travels is summed at once."""
    expected: object = None
    for form in members:
        for parameter in (factor.parameter for factor in form.factors):
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            expected = mesh if expected is None else expected
            if mesh is None or mesh != expected:
                raise ValueError(
                    f"{form.name}: a factor is not sharded, or over other ranks than the other factors; give all of "
                    "them to fully_shard, with one mesh, or keep all of them whole"
                )


def shard_group(parameter: Tensor) -> dist.ProcessGroup:
    """Return the ranks that a parameter's rows are spread over."""
    assert isinstance(parameter, DTensor)
    shards = [dim for dim, placement in enumerate(parameter.placements) if placement == Shard(0)]
    others = [p for p in parameter.placements if p != Shard(0) and not isinstance(p, Replicate)]
    if len(shards) != 1 or others:
        raise ValueError(
            f"factors must be sharded by rows over one mesh dimension, as fully_shard does, got {parameter.placements}"
        )
    return parameter.device_mesh.get_group(shards[0])
