"""Which rows of a sharded parameter this process has."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from factorized.adapters.unit import Projection


def first_row(parameter: Tensor) -> int:
    """Return the row of the whole parameter with which this process's rows begin."""
    assert isinstance(parameter, DTensor)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0])


def projection_part(projection: Projection, tensor: DTensor) -> Tensor:
    """Return what this process has of a projection's part of a tensor shaped like its weight; a view."""
    local = tensor.to_local()
    if projection.dim == 1:
        return local.narrow(1, projection.start, projection.size)
    start, stop = _row_range(projection, tensor)
    return local[start:stop]


def _row_range(projection: Projection, tensor: DTensor) -> tuple[int, int]:
    """Return where, among this process's rows, a projection whose heads lie along the rows begins and ends."""
    first, count = first_row(tensor), tensor.to_local().shape[0]
    begin = projection.start - first
    return min(max(begin, 0), count), min(max(begin + projection.size, 0), count)
