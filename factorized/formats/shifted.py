"""Convolving with a factorized kernel by two matrix products, with a shift-and-stack of thin tensors between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from factorized._torch import is_traced
from factorized.formats.convolution import Geometry, is_channels_last, pad
from factorized.formats.kernel import KernelShape, grouped
from factorized.formats.shifts import kernel_taps, output_extents, plan_shifts, shift_and_stack
from factorized.formats.thin import kernels_apply, thin_convolution


def two_products(
    x: Tensor,  # (batch, in, *spatial) or (in, *spatial)
    U: Tensor,  # (out·row taps, rank)
    V: Tensor,  # (in·column taps, rank)
    inner: Sequence[Tensor],  # each (groups·rank, rank)
    bias: Tensor | None,  # (out,)
    shape: KernelShape,
    geometry: Geometry,
) -> Tensor:  # (batch, out, *spatial)
    """Multiply by ``V`` for all column taps at once, shift and stack the thin results, multiply by ``U``.

    Between the products there is a tensor of rank × taps channels. It is padded there (a product over channels commutes
    with every padding mode), summed over the column taps, each shifted to its place, and stacked over the row taps.
    Channels-last inputs give channels-last outputs; grouped kernels run channels-first in between.
    """
    dims = len(shape.size)
    if x.dim() not in (dims + 1, dims + 2):
        raise ValueError(
            f"input must have {dims + 2} dimensions, or {dims + 1} without a batch, got shape {tuple(x.shape)}"
        )
    unbatched = x.dim() == dims + 1
    if unbatched:
        x = x.unsqueeze(0)
    g = shape.groups
    for M in inner:
        U = (grouped(U, g) @ grouped(M, g)).flatten(0, 1)
    if kernels_apply(x, U, V, shape, geometry):
        y = thin_convolution(x, U, V, geometry)
        y = y if bias is None else y + bias.to(y.dtype)[:, None, None]
        return y.squeeze(0) if unbatched else y
    if x.is_cuda:  # the GPU multiplies, and moves, channels in aligned runs of eight
        surplus = -U.shape[1] % 8
        U, V = F.pad(U, (0, surplus)), F.pad(V, (0, surplus))
    rank = U.shape[1]
    # Both factors hold the taps of a channel in rows that follow each other.
    first = V.reshape(g, shape.in_channels // g, -1).mT  # (groups, column taps·rank, in/groups)
    second = U.reshape(g, shape.out_channels // g, -1)  # (groups, out/groups, row taps·rank)

    x, geometry = _drop_unused_positions(x, shape, geometry)
    last = is_channels_last(x)
    run = _channels_last if last and g == 1 else _channels_first
    y = run(x, first, second, bias, rank, shape, geometry)
    y = y.movedim(1, -1).contiguous().movedim(-1, 1) if last and g > 1 else y
    return y.squeeze(0) if unbatched else y


def _drop_unused_positions(x: Tensor, shape: KernelShape, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """Subsample the dimensions in which a strided kernel of size 1 never reads the positions between its steps."""
    strides = tuple(
        s if k == 1 and p == (0, 0) else 1
        for s, k, p in zip(geometry.stride, shape.size, geometry.padding, strict=True)
    )
    if all(s == 1 for s in strides):
        return x, geometry
    x = x[(slice(None), slice(None), *(slice(None, None, s) for s in strides))]
    left = tuple(1 if dropped > 1 else s for s, dropped in zip(geometry.stride, strides, strict=True))
    return x, replace(geometry, stride=left)


def _channels_first(
    x: Tensor,  # (batch, in, *spatial)
    first: Tensor,  # (groups, column taps·rank, in/groups)
    second: Tensor,  # (groups, out/groups, row taps·rank)
    bias: Tensor | None,
    rank: int,
    shape: KernelShape,
    geometry: Geometry,
) -> Tensor:  # (batch, out, *spatial)
    batch, spatial, g = x.shape[0], x.shape[2:], shape.groups
    x = x.reshape(batch, g, shape.in_channels // g, prod(spatial))
    P = first @ x  # (batch, groups, column taps·rank, positions)
    P = P.reshape(batch, g * first.shape[1], *spatial)
    if geometry.padding_mode != "zeros":
        P, geometry = pad(P, geometry.padding, geometry.padding_mode), geometry.unpadded
    P = P.reshape(batch, g, first.shape[1] // rank, rank, *P.shape[2:])
    S = _shift_and_stack(P, shape, geometry, dim=2, first_dim=3)  # (batch, groups, row taps, rank, *out)
    extents = S.shape[4:]
    y = second @ S.reshape(batch, g, second.shape[2], prod(extents))  # (batch, groups, out/groups, positions)
    y = y.reshape(batch, shape.out_channels, *extents)
    if bias is not None:  # under autocast the products have a narrower type than the bias
        y = y + bias.to(y.dtype).reshape(-1, *(1,) * len(spatial))
    return y


def _channels_last(
    x: Tensor,  # (batch, in, *spatial), channels last in memory
    first: Tensor,  # (1, column taps·rank, in)
    second: Tensor,  # (1, out, row taps·rank)
    bias: Tensor | None,
    rank: int,
    shape: KernelShape,
    geometry: Geometry,
) -> Tensor:  # (batch, out, *spatial), channels last in memory
    P = F.linear(x.movedim(1, -1), first[0])  # (batch, *spatial, column taps·rank)
    if geometry.padding_mode != "zeros":  # in these modes torch pads only tensors with channels first
        P = pad(P.movedim(-1, 1), geometry.padding, geometry.padding_mode).movedim(1, -1)
        geometry = geometry.unpadded
    P = P.reshape(*P.shape[:-1], first.shape[1] // rank, rank)
    S = _shift_and_stack(P, shape, geometry, dim=P.dim() - 2, first_dim=1)  # (batch, *out, row taps, rank)
    return F.linear(S.reshape(*S.shape[:-2], second.shape[2]), second[0], bias).movedim(-1, 1)


def _shift_and_stack(
    P: Tensor,
    shape: KernelShape,
    geometry: Geometry,
    dim: int,  # of the column taps
    first_dim: int,  # of the spatial dimensions, without ``dim``
) -> Tensor:  # with row taps at ``dim``
    """Sum over the column taps, each shifted to its place; stack what every row tap sees of the sum.

    By slices where a program is traced: a compiler makes one loop of all of them.
    """
    extents = [*P.shape[:dim], *P.shape[dim + 1 :]][first_dim : first_dim + len(shape.size)]
    if type(P) is Tensor and not is_traced():
        return shift_and_stack(P, plan_shifts(tuple(extents), shape, geometry, dim, first_dim))
    before = first_dim + (dim <= first_dim)
    P = pad(P, [*geometry.padding, *[(0, 0)] * (P.dim() - before - len(shape.size))], "zeros")
    outputs = output_extents(extents, shape, geometry)

    def window(tensor: Tensor, tap: Sequence[int], first: int) -> Tensor:
        """Return what a tap sees of a padded tensor; its first spatial dimension is ``first``."""
        for d, position in enumerate(tap, start=first):
            start, stride = position * geometry.dilation[d], geometry.stride[d]
            if stride == 1:
                tensor = tensor.narrow(first_dim + d, start, outputs[d])  # faster than an index
            else:
                stop = start + (outputs[d] - 1) * stride + 1
                tensor = tensor[(slice(None),) * (first_dim + d) + (slice(start, stop, stride),)]
        return tensor

    columns = zip(P.unbind(dim), kernel_taps(shape.column_size), strict=True)
    total = reduce(torch.add, [window(part, tap, shape.row_dims) for part, tap in columns])
    return torch.stack([window(total, tap, 0) for tap in kernel_taps(shape.row_size)], dim)
