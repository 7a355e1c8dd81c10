"""What torch leaves to its users: types to compute with, autocast off, numbers of several devices, parts of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


def computable(value: Tensor) -> Tensor:
    """Return ``value`` in a type whose squares neither overflow nor lose most digits."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def without_autocast(*devices: torch.device) -> AbstractContextManager[object]:
    """Return a context whose products on ``devices`` keep their digits, where autocast would round them."""
    kinds = {device.type for device in devices} - {"meta"}
    off = [torch.autocast(kind, enabled=False) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]
    if len(off) < 2:
        return off[0] if off else nullcontext()
    stack = ExitStack()
    for context in off:
        stack.enter_context(context)
    return stack


def on_one_device(numbers: Sequence[Tensor]) -> Tensor:  # (numbers,)
    """Return single numbers, which may lie on several devices, as one tensor on the first one's."""
    return torch.stack([number.to(numbers[0].device) for number in numbers])


def local_range(tensor: DTensor, dim: int) -> tuple[int, int]:
    """Return where, along ``dim`` of a distributed tensor, this process's part begins, and its length.

    Every mesh dimension that splits it leaves pieces of ⌈length / ranks⌉.
    """
    mesh = tensor.device_mesh
    start, length = 0, tensor.shape[dim]
    for axis in split_order(tensor, dim):
        piece = -(-length // mesh.size(axis))
        skipped = min(mesh.get_local_rank(axis) * piece, length)
        start, length = start + skipped, min(piece, length - skipped)
    return start, length


def split_order(tensor: DTensor, dim: int) -> list[int]:
    """Return the mesh dimensions that split ``dim`` of a distributed tensor, one after the other.

    Those with a ``_StridedShard`` come last: so FSDP2 splits what tensor parallelism has split already.
    """
    cuts = list(enumerate(tensor.placements))
    late = [axis for axis, placement in cuts if isinstance(placement, _StridedShard) and placement.dim == dim]
    early = [axis for axis, placement in cuts if placement.is_shard(dim) and axis not in late]
    return [*early, *reversed(late)]
