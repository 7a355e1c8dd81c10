"""Choosing how a factorized layer runs, by its cost. ``autotune.py`` chooses by measuring instead.

The choice depends on the layer and its device alone, never on the input, so that a compiled or exported program needs
no guard on the batch size. Costs are in multiply-accumulates per output position; what a way of running spends on
moving its tensors is a multiple of their channels. The multiples were fitted to ``benchmarks/executions.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from factorized.maths.contraction import contracted_macs, held_channels, preparing_macs
from factorized.maths.folding import Folding
from factorized.maths.kernel import KernelShape
from factorized.maths.tensor_format import TensorFormat

# Channels between input and output, over theirs, with which a layer holds twice what the dense one does: measured.
MOST_HELD = 1.8
# Positions over which composing the weight is spread: a small training batch.
POSITIONS = 8192


@dataclass(frozen=True)
class Traffic:
    """What moving one channel of a position costs, in multiply-accumulates."""

    convolution: int  # of the input and output, when there are two convolutions instead of one
    product: int  # of the input and output, when there are two matrix products instead of one convolution
    shift: int  # of the thin tensor that is shifted and stacked between the products


TRAFFIC = {
    "cpu": Traffic(convolution=100, product=55, shift=40),
    "cuda": Traffic(convolution=1200, product=0, shift=200),
}
# cuDNN takes as long for fewer channels than this; matrix products and shifts run on multiples of eight.
CUDA_CHANNELS, CUDA_RANKS = 64, 8


def cheapest_conv(
    shape: KernelShape, rank: int, depth: int, stride: tuple[int, ...], device: str, compiled: bool = False
) -> str:
    """Return ``"two_convs"``, ``"one_conv"`` or ``"two_products"``, whichever costs least for this layer."""
    on_cpu = device == "cpu"
    traffic = TRAFFIC["cpu" if on_cpu else "cuda"]
    row_taps, column_taps = prod(shape.row_size), prod(shape.column_size)
    row_stride = prod(stride[: shape.row_dims])
    unskipped = prod([s for s, k in zip(stride, shape.size, strict=True) if k > 1])
    least = 1 if on_cpu or shape.groups > 1 else CUDA_CHANNELS
    dense = max(shape.out_channels, least) * max(shape.in_channels // shape.groups, least) * prod(shape.size)
    aligned = rank if on_cpu else -(-rank // CUDA_RANKS) * CUDA_RANKS
    first, second = shape.in_channels * column_taps, shape.out_channels * row_taps
    channels = shape.in_channels + shape.out_channels
    moved = traffic.product * channels + traffic.shift * shape.groups * aligned * (column_taps * unskipped + row_taps)
    if prod(shape.size) == 1:  # nothing to shift: as cheap to move as one convolution
        moved = 0
    inner = depth * shape.groups * rank * rank
    costs = {
        "one_conv": dense + _composing(shape, rank, depth),
        "two_convs": (rank * first + inner) * row_stride + rank * second + traffic.convolution * channels,
        "two_products": aligned * (first * unskipped + second) + moved,
    }
    if not (on_cpu or compiled):  # without a compiler each of the products' many small operations is a launch
        del costs["two_products"]
    return min(costs, key=costs.__getitem__)


def cheapest_linear(shape: KernelShape, rank: int, depth: int) -> str:
    """Return ``"two_products"`` or, where composing the weight first costs less, ``"one_product"``."""
    thin = shape.factor_numel(rank, depth)
    return "two_products" if thin <= shape.numel + _composing(shape, rank, depth) else "one_product"


def contracting_is_cheaper(
    tensor: TensorFormat,
    folding: Folding,
    moving: int = 0,  # what moving one channel costs, where there are more operations
    stride_area: int = 1,  # positions of the input per position of the output
) -> bool:
    """Return whether contracting cores with the input costs less than composing the weight, in time and in memory.

    No layer may hold more than twice what the dense one does, which trains with its weight and the weight's gradient,
    input and output. So composing is left where the tensors on the way to the weight are too large, and contracting
    where those on the way to the output are.
    """
    channels = folding.shape.in_channels + folding.shape.out_channels
    contracting_fits = held_channels(folding, tensor) <= MOST_HELD * channels
    composed = tensor.numel + tensor.expand_macs / POSITIONS
    prepared = preparing_macs(folding, tensor) / POSITIONS
    contracted = contracted_macs(folding, tensor, 1, stride_area) + prepared + moving * channels
    return contracting_fits and (contracted < composed or not tensor.keeps_little)


def _composing(shape: KernelShape, rank: int, depth: int) -> float:
    shorter = min(shape.rows, shape.columns)
    macs = shape.groups * rank * (shape.rows * shape.columns + depth * shorter * rank)
    return macs / POSITIONS
