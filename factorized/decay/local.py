"""What a process has of a distributed parameter, and which placements a product's factors may have."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from factorized._torch import local_range
from factorized.attention.unit import Projection


def check_placements(factors: Mapping[str, Tensor]) -> None:
    """Raise unless the factors of a product, by name, are all whole, or all split or replicated over one mesh."""
    placed = {name: factor for name, factor in factors.items() if isinstance(factor, DTensor)}
    if not placed:
        return
    first, mesh = next((name, factor.device_mesh) for name, factor in placed.items())
    for name in factors:
        if name not in placed:
            raise ValueError(
                f"{name} is not sharded, but {first}, a factor of the same product, is; give all factors of a product "
                "to fully_shard or parallelize_module, with one mesh, or keep all of them whole"
            )
        factor = placed[name]
        if factor.device_mesh != mesh:
            raise ValueError(
                f"{name} is distributed over other ranks than {first}, a factor of the same product "
                f"({factor.device_mesh} and {mesh}); give both one mesh"
            )
        if any(placement.is_partial() for placement in factor.placements) or not _is_split_in_order(factor):
            raise ValueError(
                f"{name} has placements {factor.placements}; on every mesh dimension a factor of a product may be "
                "Shard, Replicate, or what fully_shard makes of a factor that parallelize_module has split: "
                "redistribute it"
            )


def _is_split_in_order(tensor: DTensor) -> bool:
    """Return whether every ``_StridedShard`` splits what all other mesh dimensions have split before, as FSDP2 does."""
    dims = split_dims(tensor)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            others = [other for other, dim in dims.items() if dim == placement.dim and other != axis]
            if min(others, default=0) < axis or placement.split_factor != prod(map(tensor.device_mesh.size, others)):
                return False
    return True


def as_distributed(parameter: Tensor) -> DTensor:
    """Return a parameter that is known to be a distributed tensor as one."""
    return cast(DTensor, parameter)


def split_dims(tensor: DTensor) -> dict[int, int]:
    """Return the mesh dimensions that split a tensor, each with the dimension of the tensor that it splits."""
    placed = enumerate(tensor.placements)
    return {axis: placement.dim for axis, placement in placed if isinstance(placement, (Shard, _StridedShard))}


def is_by_rows(parameter: DTensor, but_for: int | None = None) -> bool:
    """Return whether no mesh dimension, ``but_for`` one, splits anything of a parameter but its rows."""
    return all(dim == 0 for axis, dim in split_dims(parameter).items() if axis != but_for)


def row_groups(parameter: DTensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that a parameter's rows are spread over, one for each mesh dimension that does."""
    return [parameter.device_mesh.get_group(axis) for axis, dim in split_dims(parameter).items() if dim == 0]


def projection_part(
    projection: Projection,
    local: Tensor,  # this process's part of a tensor shaped like the weight
    weight: DTensor,
) -> Tensor:
    """Return what is a projection's in the part that this process has; a view."""
    start, length = local_range(weight, projection.dim)
    begin, end = (min(max(row - start, 0), length) for row in (projection.start, projection.start + projection.size))
    return local.narrow(projection.dim, begin, end - begin)


def own_part(
    whole: Tensor,  # like the whole parameter
    parameter: DTensor,
) -> Tensor:
    """Return the part of a whole tensor, which every process has, that this one has of ``parameter``; a view."""
    for dim in range(whole.dim()):
        whole = whole.narrow(dim, *local_range(parameter, dim))
    return whole


def placed_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with the placements of its parameter; distributed tensors may leave it as partial sums."""
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return gradient
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has placements {parameter.placements}, and partial sums "
            "cannot be trained; redistribute it to Shard or Replicate"
        )
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)
