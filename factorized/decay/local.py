"""What a process has of a distributed parameter, and which placements a product's factors may have."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from factorized.attention.unit import Projection


def check_placements(factors: Mapping[str, Tensor]) -> None:
    """Raise unless the factors of a product, by name, are all whole, or all split or replicated over one mesh."""
    meshes = {name: factor.device_mesh for name, factor in factors.items() if isinstance(factor, DTensor)}
    for name, factor in factors.items():
        if not isinstance(factor, DTensor):
            if meshes:
                raise ValueError(
                    f"{name} is not sharded, but {next(iter(meshes))}, a factor of the same product, is; give all "
                    "factors of a product to fully_shard, with one mesh, or keep all of them whole"
                )
            continue
        if factor.device_mesh != next(iter(meshes.values())):
            raise ValueError(
                f"{name} is distributed over other ranks than {next(iter(meshes))}, a factor of the same product "
                f"({factor.device_mesh} and {next(iter(meshes.values()))}); give both one mesh"
            )
        if not all(isinstance(placement, (Shard, Replicate)) for placement in factor.placements):
            raise ValueError(
                f"{name} has placements {factor.placements}; a factor of a product may be Shard or Replicate on every "
                "mesh dimension: redistribute it, and apply either fully_shard or tensor parallelism to it, not both"
            )


def row_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that a parameter's rows are spread over; None where every rank has all of them."""
    assert isinstance(parameter, DTensor)
    cut = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
    return parameter.device_mesh.get_group(cut[0]) if cut else None


def is_by_rows(parameter: Tensor) -> bool:
    """Return whether a distributed parameter is split by rows over at most one mesh dimension, as by fully_shard."""
    assert isinstance(parameter, DTensor)
    cut = [placement for placement in parameter.placements if isinstance(placement, Shard)]
    return not cut or cut == [Shard(0)]


def first_index(tensor: Tensor, dim: int = 0) -> int:
    """Return where, along ``dim`` of the whole tensor, this process's part begins."""
    assert isinstance(tensor, DTensor)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offset[dim])


def projection_part(projection: Projection, tensor: DTensor) -> Tensor:
    """Return what this process has of a projection's part of a tensor shaped like its weight; a view."""
    local, dim = tensor.to_local(), projection.dim
    begin, count = projection.start - first_index(tensor, dim), local.shape[dim]
    start, stop = (min(max(row, 0), count) for row in (begin, begin + projection.size))
    return local.narrow(dim, start, stop - start)


def own_part(
    whole: Tensor,  # like the whole parameter
    parameter: Tensor,
) -> DTensor:
    """Return a whole tensor, which every rank has, distributed as ``parameter`` is; nothing is communicated."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, parameter.placements)


def placed_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with the placements of its parameter; tensor parallelism may leave it as partial sums."""
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
