"""Norms of many tensors; sharded ones count as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from factorized._torch import on_one_device


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has: all of it unless it is sharded. Changes reach the tensor.

    Call it without recording gradients.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norms(
    local: Sequence[Tensor],  # this rank's part of each
    owners: Sequence[Tensor],  # the parameters they are shaped like
) -> Tensor:  # (tensors,)
    """Return the norm of every tensor; the squares of shards are summed over the ranks that hold them."""
    kind = torch.float64 if any(tensor.dtype == torch.float64 for tensor in local) else torch.float32
    # In at least single precision: in half precision the norm overflows or has only three digits.
    stacked = on_one_device(torch._foreach_norm(list(local), 2, kind))
    sharded: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, owner in enumerate(owners):
        if isinstance(owner, DTensor):
            sharded.setdefault(_groups_of(owner), []).append(index)
    for groups, indices in sharded.items():
        squares = stacked[indices].square()
        for group in groups:
            dist.all_reduce(squares, group=group)
        stacked[indices] = squares.sqrt()
    return stacked


def global_norm(local: Sequence[Tensor], owners: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together."""
    return torch.linalg.vector_norm(norms(local, owners))


def _groups_of(parameter: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks that a parameter is split over, one for each mesh dimension that splits it."""
    dims = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return tuple(parameter.device_mesh.get_group(dim) for dim in dims)
