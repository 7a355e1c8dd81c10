"""Applying a tensor in a format to an input without forming it, where its dimensions keep outputs and inputs apart."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor

from factorized.maths.convolution import Geometry, convolve
from factorized.maths.folding import Folding
from factorized.maths.tensor_format import TensorFormat
from factorized.maths.tensor_train import TrainFormat, tt_halves
from factorized.maths.tucker import TuckerFormat


def can_contract(folding: Folding) -> bool:
    """Return whether the folding's outputs and inputs are apart, in a way that plain layers can follow."""
    boundary, shape = folding.boundary, folding.shape
    if boundary is None or shape.groups > 1:
        return False
    if folding.method == "tensor_train" or not shape.size:
        return True
    # 1×1, a small kernel, 1×1: channels must be one dimension each, and the kernel's own be kept.
    channels = len(folding.dims) - folding.kept
    return boundary == 1 and channels == 2 and (folding.kept > 0 or prod(shape.size) == 1)


def contracted_macs(
    folding: Folding,
    tensor: TensorFormat,
    positions: int = 1,  # of the output
    input_positions: int = 1,  # more of them where a convolution has a stride
) -> int:
    """Return the multiply-accumulates of running without the composed weight."""
    boundary = folding.boundary
    assert boundary is not None
    if isinstance(tensor, TrainFormat):
        middle = tensor.ranks[boundary - 1]
        return positions * middle * (folding.shape.out_channels + folding.shape.numel // folding.shape.out_channels)
    assert isinstance(tensor, TuckerFormat)
    first, *others = [before * after // shared for before, after, shared in _steps(tensor, boundary)]
    seen_first = positions if spanning_place(folding, 3) == 0 else input_positions
    return seen_first * first + positions * (prod(tensor.core_extents) + sum(others))


def spanning_place(folding: Folding, count: int) -> int:
    """Return which of a chain of ``count`` kernels spans space: the k×k one, or the first where all are 1×1.

    The first one then skips what a stride skips, for all that follow. It is the first of a train's two.
    """
    return 0 if prod(folding.shape.size) == 1 else max(count - 2, 0)


def held_channels(folding: Folding, tensor: TensorFormat) -> int:
    """Return the channels per position of all tensors between input and output."""
    boundary = folding.boundary
    assert boundary is not None
    if isinstance(tensor, TrainFormat):
        return tensor.ranks[boundary - 1]
    assert isinstance(tensor, TuckerFormat)
    after = sum([after for _, after, _ in _steps(tensor, boundary)])
    return after + prod(tensor.ranks[:boundary]) - folding.shape.out_channels


def preparing_macs(folding: Folding, tensor: TensorFormat) -> int:
    """Return the multiply-accumulates that running without the composed weight takes once, whatever the input."""
    assert folding.boundary is not None
    if isinstance(tensor, TrainFormat):
        return tensor.halves_macs(folding.boundary)
    assert isinstance(tensor, TuckerFormat)
    return 0 if tensor.train is None else tensor.train.expand_macs


def chain(
    folding: Folding,
    tensor: TensorFormat,
    cores: Sequence[Tensor],
) -> list[Tensor]:  # kernels (channels out, channels in, *size), of the first to be applied first
    """Return the weights of plain layers that, one after the other, are the tensor: two of a train, three of Tucker."""
    shape, boundary = folding.shape, folding.boundary
    assert boundary is not None
    ones = [1] * len(shape.size)
    if isinstance(tensor, TrainFormat):
        left, right = tt_halves(cores, boundary)
        return [right.reshape(-1, *shape.weight_shape[1:]), left.reshape(*left.shape, *ones)]
    assert isinstance(tensor, TuckerFormat)
    core, factors = tensor.parts(cores)
    present = [factor for factor in factors if factor is not None]
    outputs, inputs = _kronecker(present[:boundary]), _kronecker(present[boundary:])
    middle = core.reshape(outputs.shape[1], inputs.shape[1], *shape.size)
    return [inputs.mT.reshape(*inputs.mT.shape, *ones), middle, outputs.reshape(*outputs.shape, *ones)]


def contract_linear(
    x: Tensor,  # (..., in)
    folding: Folding,
    tensor: TensorFormat,
    cores: Sequence[Tensor],
    bias: Tensor | None,  # (out,)
) -> Tensor:  # (..., out)
    """Multiply by the halves of a train, or by a Tucker tensor mode after mode."""
    boundary = folding.boundary
    assert boundary is not None
    if isinstance(tensor, TrainFormat):
        left, right = tt_halves(cores, boundary)
        return F.linear(F.linear(x, right), left, bias)
    assert isinstance(tensor, TuckerFormat)
    core, factors = tensor.parts(cores)
    present = [factor for factor in factors if factor is not None]
    x = _each_mode(x.unflatten(-1, tensor.dims[boundary:]), [factor.mT for factor in present[boundary:]])
    matrix = core.reshape(prod(tensor.ranks[:boundary]), -1)
    y = F.linear(x.flatten(-len(present) + boundary), matrix).unflatten(-1, tensor.ranks[:boundary])
    y = _each_mode(y, present[:boundary]).flatten(-boundary)
    return y if bias is None else y + bias.to(y.dtype)


def contract_conv(
    x: Tensor,  # (batch, in, *spatial) or (in, *spatial)
    folding: Folding,
    tensor: TensorFormat,
    cores: Sequence[Tensor],
    bias: Tensor | None,  # (out,)
    geometry: Geometry,
) -> Tensor:  # (batch, out, *spatial)
    """Convolve with one plain kernel after the other; the one that spans space has the geometry."""
    kernels = chain(folding, tensor, cores)
    spans = spanning_place(folding, len(kernels))
    for place, kernel in enumerate(kernels):
        own = geometry if place == spans else geometry.part(0, 0)
        x = convolve(x, kernel, bias if place == len(kernels) - 1 else None, own, groups=1)
    return x


def _each_mode(
    x: Tensor,  # (..., e₁, …, e_m)
    matrices: Sequence[Tensor],  # each (d_k, e_k)
) -> Tensor:  # (..., d₁, …, d_m)
    """Multiply every trailing dimension by its matrix, the last one first; the others wait behind it in turn."""
    for matrix in reversed(matrices):
        x = F.linear(x, matrix).movedim(-1, -len(matrices))
    return x


def _kronecker(factors: Sequence[Tensor]) -> Tensor:  # (∏ d_k, ∏ R_k)
    product = factors[0]
    for factor in factors[1:]:
        product = (product[:, None, :, None] * factor[None, :, None, :]).flatten(2).flatten(0, 1)
    return product


def _steps(tensor: TuckerFormat, boundary: int) -> list[tuple[int, int, int]]:
    """Return, per mode product, the channels before and after it, and those of the modes that it leaves alone."""
    count = len(tensor.ranks)
    sides = [
        (tensor.dims[boundary:count], tensor.ranks[boundary:]),
        (tensor.ranks[:boundary], tensor.dims[:boundary]),
    ]
    return [
        (
            prod(old[: mode + 1]) * prod(new[mode + 1 :]),
            prod(old[:mode]) * prod(new[mode:]),
            prod(old[:mode]) * prod(new[mode + 1 :]),
        )
        for old, new in sides
        for mode in reversed(range(len(old)))
    ]
