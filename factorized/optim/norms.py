"""Norms of many tensors, of sharded ones as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has: all of it unless it is sharded. Changes reach the tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()  # type: ignore[attr-defined]


def norms(
    local: Sequence[Tensor],  # what this rank has of each
    owners: Sequence[Tensor],  # the parameters they are shaped like
) -> Tensor:  # (tensors,)
    """Return the norm of every tensor; shards are put together by a sum of squares over their ranks."""
    kind = torch.float64 if any(tensor.dtype == torch.float64 for tensor in local) else torch.float32
    # In at least single precision: the norm of a half tensor, kept as such, overflows or has three digits.
    stacked = torch.stack([norm.to(local[0].device) for norm in torch._foreach_norm(list(local), 2, kind)])
    sharded: dict[dist.ProcessGroup, list[int]] = {}
    for index, owner in enumerate(owners):
        if isinstance(owner, DTensor):
            sharded.setdefault(_ranks_of(owner), []).append(index)
    for ranks, indices in sharded.items():
        squares = stacked[indices].square()
        dist.all_reduce(squares, group=ranks)
        stacked[indices] = squares.sqrt()
    return stacked


def global_norm(local: Sequence[Tensor], owners: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together."""
    return torch.linalg.vector_norm(norms(local, owners))


def _ranks_of(parameter: DTensor) -> dist.ProcessGroup:
    """Return the ranks that a parameter's parts, whichever dimension they are cut along, are spread over."""
    cut = [dim for dim, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    if len(cut) != 1 or not parameter.placements[cut[0]].is_shard():
        raise ValueError(
            f"parameters must be sharded over one mesh dimension, as fully_shard does, got {parameter.placements}"
        )
    return parameter.device_mesh.get_group(cut[0])
