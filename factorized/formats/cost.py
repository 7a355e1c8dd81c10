"""What each way of running a convolution costs, in multiply-accumulates per output position."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from factorized.formats.convolution import is_channels_last
from factorized.formats.kernel import KernelShape

Device = Literal["cpu", "cpu, channels last", "cpu, fast products", "cuda"]  # what costs differ by

# Output positions over which composing the weight is spread: a small training batch.
POSITIONS = 8192
# Input positions: with fewer, convolutions on a CPU take longer to prepare kernels, in every call, than they save. On
# AMD with channels first only: else kernels are small, or read where they lie (``convolution.py``).
FEW_POSITIONS = {"AMD": 64, "other": 2048}


@dataclass(frozen=True)
class Traffic:
    """What moving one channel of a position costs, in multiply-accumulates; fitted to ``benchmarks/ways.py``."""

    convolution: int  # of the input and output, when there are two convolutions instead of one
    pointwise: int  # the same for a kernel of one tap
    product: int  # of the input and output, when there are two matrix products instead of one convolution
    shift: int  # of the thin tensor that is shifted and stacked between the products


TRAFFIC: dict[Device, Traffic] = {
    "cpu": Traffic(convolution=60, pointwise=60, product=55, shift=100),
    "cpu, channels last": Traffic(convolution=60, pointwise=20, product=55, shift=100),
    "cpu, fast products": Traffic(convolution=100, pointwise=100, product=55, shift=40),
    "cuda": Traffic(convolution=1200, pointwise=1200, product=0, shift=200),
}
# cuDNN is no faster with fewer channels than this; matrix products and shifts run on multiples of eight.
CUDA_CHANNELS, CUDA_RANKS = 64, 8


def processor() -> str:
    """Return what the system says of its first processor."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            return file.read(4096)
    except OSError:
        return os.environ.get("PROCESSOR_IDENTIFIER", "")  # on Windows


# torch multiplies matrices by Intel's library, and there products take up to twice as long as thin convolutions
IS_AMD = "AuthenticAMD" in processor()


def cpu_of(
    x: Tensor | None = None,  # (batch, channels, *spatial) or (channels, *spatial); None: not known
    channels: int = 1,
) -> Device:
    """Return which costs this machine's processor has for an input, with gradients or without."""
    if x is None:
        return "cpu" if IS_AMD else "cpu, fast products"
    last, few = is_channels_last(x), x.numel() < FEW_POSITIONS["AMD" if IS_AMD else "other"] * channels
    if not IS_AMD:
        return "cpu" if last and not few else "cpu, fast products"
    if last:
        return "cpu, channels last"
    return "cpu, fast products" if few and not torch.is_grad_enabled() else "cpu"


def dense_cost(shape: KernelShape, device: Device) -> int:
    """Return the cost of one convolution with the whole kernel."""
    least = CUDA_CHANNELS if device == "cuda" and shape.groups == 1 else 1
    return max(shape.out_channels, least) * max(shape.in_channels // shape.groups, least) * prod(shape.size)


def two_convolutions_cost(shape: KernelShape, rank: int, depth: int, stride: tuple[int, ...], device: Device) -> int:
    """Return the cost of two thin convolutions with pointwise ones between them.

    All but the last also run at the positions that the last one's stride skips.
    """
    first, second, channels = _sides(shape)
    thin = (rank * first + depth * shape.groups * rank * rank) * prod(stride[: shape.row_dims]) + rank * second
    traffic = TRAFFIC[device]
    return thin + (traffic.pointwise if prod(shape.size) == 1 else traffic.convolution) * channels


def two_products_cost(shape: KernelShape, rank: int, stride: tuple[int, ...], device: Device, compiled: bool) -> float:
    """Return the cost of two matrix products with shifts between them.

    It is infinite on a GPU without a compiler, where each of their many small operations is a launch.
    """
    if device == "cuda" and not compiled:
        return float("inf")
    first, second, channels = _sides(shape)
    aligned = -(-rank // CUDA_RANKS) * CUDA_RANKS if device == "cuda" else rank
    unskipped = prod([s for s, k in zip(stride, shape.size, strict=True) if k > 1])
    shifted = shape.groups * aligned * (prod(shape.column_size) * unskipped + prod(shape.row_size))
    moved = TRAFFIC[device].product * channels + TRAFFIC[device].shift * shifted
    if prod(shape.size) == 1 and device != "cpu, channels last":  # nothing to shift: the traffic of one convolution
        moved = 0
    return aligned * (first * unskipped + second) + moved


def _sides(shape: KernelShape) -> tuple[int, int, int]:
    """Return what a rank costs before and after the thin tensor, and the channels of input and output."""
    first, second = shape.in_channels * prod(shape.column_size), shape.out_channels * prod(shape.row_size)
    return first, second, shape.in_channels + shape.out_channels
