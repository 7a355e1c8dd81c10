"""Convolving with a factorized kernel, by two convolutions or by one with the composed kernel.

Of a kernel ``U M₁…M_d Vᵀ``, ``V`` acts on the trailing spatial dimensions and ``U`` on the leading ones
(``kernel.py``), so padding and stride of a dimension can wait until the factor that spans it, where the tensors are
thin. The third way, by two matrix products, is ``products.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from factorized.maths.frobenius import compose
from factorized.maths.kernel import KernelShape, column_kernel, grouped, inner_kernel, row_kernel, to_kernel

_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over its input; every tuple has one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after
    dilation: tuple[int, ...]
    padding_mode: str = "zeros"

    def part(self, first: int, last: int) -> Geometry:
        """Keep the spatial dimensions ``first <= d < last`` and make the others those of a pointwise convolution."""
        kept = [first <= d < last for d in range(len(self.stride))]
        return Geometry(
            stride=tuple(s if keep else 1 for s, keep in zip(self.stride, kept, strict=True)),
            padding=tuple(p if keep else (0, 0) for p, keep in zip(self.padding, kept, strict=True)),
            dilation=tuple(d if keep else 1 for d, keep in zip(self.dilation, kept, strict=True)),
            padding_mode=self.padding_mode,
        )


def explicit_padding(
    padding: str | Sequence[int],
    size: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Return what is added before and after each dimension; ``"same"`` puts an odd remainder after, as torch does."""
    if padding == "valid":
        return tuple((0, 0) for _ in size)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(p), int(p)) for p in padding)


def pad(
    x: Tensor,  # (..., *spatial)
    padding: Sequence[tuple[int, int]],
    mode: str,
) -> Tensor:
    """Pad the trailing spatial dimensions of ``x`` in torch's ``padding_mode``."""
    if not any(before or after for before, after in padding):
        return x
    reversed_pairs = [extent for pair in reversed(padding) for extent in pair]
    return F.pad(x, reversed_pairs, mode="constant" if mode == "zeros" else mode)


def convolve(
    x: Tensor,  # (batch, in, *spatial) or (in, *spatial)
    kernel: Tensor,  # (out, in/groups, *size)
    bias: Tensor | None,  # (out,)
    geometry: Geometry,
    groups: int,
) -> Tensor:  # (batch, out, *spatial)
    """Apply a dense kernel; asymmetric and non-zero padding is done beforehand."""
    if geometry.padding_mode == "zeros" and all(before == after for before, after in geometry.padding):
        padding = tuple(before for before, _ in geometry.padding)
    else:
        x = pad(x, geometry.padding, geometry.padding_mode)
        padding = (0,) * len(geometry.padding)
    if not x.is_cuda:  # the CPU's float64 and float16 convolutions have no, or a wrong, gradient for some strides
        kernel = kernel.clone(memory_format=torch.contiguous_format)
    apply = _CONVOLVE[len(geometry.stride)]
    return apply(x, kernel, bias, geometry.stride, padding, geometry.dilation, groups)


def two_convs(
    x: Tensor,  # (batch, in, *spatial)
    U: Tensor,  # (out·row taps, rank)
    V: Tensor,  # (in·column taps, rank)
    inner: Sequence[Tensor],  # each (groups·rank, rank)
    bias: Tensor | None,  # (out,)
    shape: KernelShape,
    geometry: Geometry,
) -> Tensor:  # (batch, out, *spatial)
    """Convolve with ``V`` over the trailing dimensions, with the inner matrices pointwise, with ``U`` over the rest."""
    dims = len(shape.size)
    pointwise = geometry.part(0, 0)
    x = convolve(x, column_kernel(V, shape), None, geometry.part(shape.row_dims, dims), shape.groups)
    for M in reversed(inner):
        x = convolve(x, inner_kernel(M, shape), None, pointwise, shape.groups)
    return convolve(x, row_kernel(U, shape), bias, geometry.part(0, shape.row_dims), shape.groups)


def composed_kernel(
    U: Tensor,  # (out·row taps, rank)
    V: Tensor,  # (in·column taps, rank)
    inner: Sequence[Tensor],  # each (groups·rank, rank)
    shape: KernelShape,
) -> Tensor:  # (out, in/groups, *size)
    """Return the dense kernel that the factors stand for."""
    g = shape.groups
    if g > 1:
        U, V, inner = grouped(U, g), grouped(V, g), [grouped(M, g) for M in inner]
    return to_kernel(compose(U, V, inner), shape)
