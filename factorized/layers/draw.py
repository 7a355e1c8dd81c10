"""Drawing the factors of a layer, or a dense weight to decompose, at random."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from factorized.maths.kernel import KernelShape, grouped

Init = Literal["spectral", "default", "kaiming", "normal"] | Callable[[Tensor], object]
INITS = ("spectral", "default", "kaiming", "normal")


def check_init(init: Init) -> None:
    """Raise unless ``init`` is one of the names or a callable."""
    if not callable(init) and init not in INITS:
        names = ", ".join(f'"{name}"' for name in INITS)
        raise ValueError(f"init must be one of {names} or a callable that fills a tensor in place, got {init!r}")


def draw(
    U: Tensor,  # (groups·rows, rank), filled in place
    V: Tensor,  # (groups·columns, rank), filled in place
    shape: KernelShape,
    init: Init,
) -> None:
    """Draw ``U`` (rows × rank) and ``Vᵀ`` (rank × columns) of every group as if each were a layer's weight.

    ``"kaiming"`` is Kaiming normal on the factor's own fan-in and ``"normal"`` is N(0, 2/(k²·out)) with the kernel size
    and output channels of the whole layer, the paper's choices for ResNet and VGG; ``"default"`` is what torch does to
    a fresh linear or convolution. A callable gets each matrix and fills it in place, like those of ``torch.nn.init``.
    """
    fill = init if callable(init) else fill_of(init, shape)
    for factor, transposed in ((U, False), (V, True)):
        for part in grouped(factor, shape.groups):
            matrix = torch.empty_like(part.mT if transposed else part, memory_format=torch.contiguous_format)
            fill(matrix)
            part.copy_(matrix.mT if transposed else matrix)


def draw_dense_as(
    weight: Tensor,  # (out, in, *size), filled in place
    shape: KernelShape,
    init: Init,
) -> None:
    """Draw a dense weight as ``init`` says."""
    fill = init if callable(init) else fill_of(init, shape)
    fill(weight)


def draw_dense(
    weight: Tensor,  # (out, in, *size), filled in place
) -> None:
    """Draw a dense weight as torch does for a fresh linear or convolution."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


@torch.no_grad()
def draw_bias(
    bias: Tensor | None,  # (out,), filled in place
    fan_in: int,
) -> None:
    """Draw a bias as torch does for a fresh linear or convolution."""
    if bias is not None and not bias.is_meta:
        bias.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


def fill_identity(
    M: Tensor,  # (groups·rank, rank), filled in place
) -> None:
    """Make an inner matrix the identity, in every group."""
    rank = M.shape[1]
    M.copy_(torch.eye(rank, dtype=M.dtype, device=M.device).repeat(M.shape[0] // rank, 1))


def fill_of(init: str, shape: KernelShape) -> Callable[[Tensor], object]:
    """Return the function that fills a matrix of a layer of this shape in place, for the name of an init."""
    if init == "kaiming":
        return nn.init.kaiming_normal_
    if init == "normal":
        deviation = math.sqrt(2 / (shape.out_channels * math.prod(shape.size)))
        return lambda matrix: matrix.normal_(0, deviation)
    return draw_dense
