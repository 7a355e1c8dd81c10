"""Norms of many tensors, of sharded ones as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from factorized.decay.sharded import is_sharded, shard_group


def local_part(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank has: all of them unless it is sharded. Changes reach the tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()  # type: ignore[attr-defined]


def norms(
    local: Sequence[Tensor],  # what this rank has of each
    owners: Sequence[Tensor],  # the parameters they are shaped like
) -> Tensor:  # (tensors,)
    """Return the norm of every tensor; shards are put together by one sum of squares over their ranks."""
    double = any(tensor.dtype == torch.float64 for tensor in local)
    each = [norm.to(local[0].device, torch.float64 if double else torch.float32) for norm in _foreach_norm(local)]
    stacked = torch.stack(each)
    sharded = [index for index, owner in enumerate(owners) if is_sharded(owner)]
    if sharded:
        squares = stacked[sharded].square()
        dist.all_reduce(squares, group=shard_group(owners[sharded[0]]))
        stacked[sharded] = squares.sqrt()
    return stacked


def global_norm(local: Sequence[Tensor], owners: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together."""
    return torch.linalg.vector_norm(norms(local, owners))


def _foreach_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | list[Tensor]:
    return torch._foreach_norm(list(tensors))
