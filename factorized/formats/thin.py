"""A low-rank 3×3 convolution on a GPU by custom kernels: three launches forward, three backward.

The kernels convolve along the width into a thin tensor, which has a channel per rank, and from there along the height.
The compiler's way of two matrix products (``shifted.py``) moves three times as many thin channels, in five launches
forward and ten backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from factorized._torch import is_exporting, is_known, is_traced, is_transformed, kept_by_compiler, triton_capability
from factorized.formats.convolution import Geometry, convolve
from factorized.formats.kernel import KernelShape, to_kernel
from factorized.formats.launches import Launch, builder, run_all
from factorized.formats.thin_launches import TAPS, backward_launches, count_splits, forward_launches

PLAIN = (Tensor, Parameter)  # distributed tensors and other subclasses have operators of their own
LARGEST_RANK = 32  # above it, the compiler's matrix products were faster
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)  # of GPUs whose tensor cores support bfloat16


def kernels_apply(x: Tensor, U: Tensor, V: Tensor, shape: KernelShape, geometry: Geometry) -> bool:
    """Return whether the kernels can run a convolution: 3×3, channels-last, in half precision, on a recent GPU.

    A size that is not known while compiling is not one for the kernels, so that it needs no guard.
    """
    return x.is_cuda and kernels_suit(x, U, V, shape, geometry) and not is_transformed() and can_build_kernels(x.device)


def kernels_suit(x: Tensor, U: Tensor, V: Tensor, shape: KernelShape, geometry: Geometry) -> bool:
    """Return whether the kernels support a convolution, on any device."""
    return (
        all(type(tensor) in PLAIN for tensor in (x, U, V))
        and shape.size == (TAPS, TAPS)
        and shape.row_dims == 1
        and shape.groups == 1
        and U.shape[1] <= LARGEST_RANK
        and geometry.padding_mode == "zeros"
        and geometry.dilation == (1, 1)
        and x.dim() == 4
        and all(is_known(extent > 0) for extent in x.shape)
        and computing_type(x) in DTYPES
        and U.dtype == V.dtype
        and (U.dtype == computing_type(x) or torch.is_autocast_enabled(x.device.type))
        and is_known(x.numel() * -(-shape.out_channels // shape.in_channels) < 2**31)
        and x.is_contiguous(memory_format=torch.channels_last)  # asked last of the sizes: the answer is a guard on them
        and not is_exporting()  # exported programs run where this package is not installed
        and (torch.compiler.is_compiling() or not is_traced())
    )


def computing_type(x: Tensor) -> torch.dtype:
    """Return the type that a convolution of ``x`` computes in: that of autocast, where it is on and casts ``x``."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else x.dtype


@kept_by_compiler
def can_build_kernels(device: torch.device) -> bool:
    """Return whether there is Triton, and a GPU that has what the kernels need."""
    return triton_capability(device) >= CAPABILITY


def thin_convolution(
    x: Tensor,  # (batch, in, height, width), channels-last
    U: Tensor,  # (out·3, rank)
    V: Tensor,  # (in·3, rank)
    geometry: Geometry,
) -> Tensor:  # (batch, out, height, width), channels-last
    """Convolve with the kernel that ``U Vᵀ`` stands for."""
    padding = [extent for pair in geometry.padding for extent in pair]
    y: Tensor = _thin_convolution(x.to(computing_type(x)), U, V, list(geometry.stride), padding)[0]
    return y


@torch.library.custom_op(
    "factorized::thin_convolution",
    mutates_args=(),
    schema="(Tensor x, Tensor U, Tensor V, int[] stride, int[] padding) -> (Tensor, Tensor, Tensor)",
)
def _thin_convolution(
    x: Tensor, U: Tensor, V: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the convolution, the thin tensor, and both factors as the kernels read them."""
    results = _empty_results(x, U, V, stride, padding)
    x = x.contiguous(memory_format=torch.channels_last)
    run_all(forward_launches(x, U, V, *results, stride, padding), x.device)
    return results


@_thin_convolution.register_fake
def _traced_results(
    x: Tensor, U: Tensor, V: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        builder.ask(_forward_of, x.device, x, U, V, tuple(stride), tuple(padding))
    return _empty_results(x, U, V, stride, padding)


def _forward_of(x: Tensor, U: Tensor, V: Tensor, stride: Sequence[int], padding: Sequence[int]) -> list[Launch]:
    return forward_launches(x, U, V, *_empty_results(x, U, V, stride, padding), stride, padding)


def _empty_results(
    x: Tensor, U: Tensor, V: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, height, width = x.shape
    high = (height + padding[0] + padding[1] - TAPS) // stride[0] + 1
    wide = (width + padding[2] + padding[3] - TAPS) // stride[1] + 1
    y = x.new_empty((batch, high, wide, U.shape[0] // TAPS)).permute(0, 3, 1, 2)
    pitch = -(-U.shape[1] // 16) * 16
    thin = x.new_empty((batch, height, wide, pitch)).permute(0, 3, 1, 2)
    return y, thin, x.new_empty((U.shape[0] + V.shape[0], pitch))


@torch.library.custom_op(
    "factorized::thin_convolution_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor thin, Tensor packed, int rank, int[] stride, int[] padding) "
    "-> (Tensor, Tensor)",
)
def _thin_backward(
    gradient: Tensor,
    x: Tensor,
    thin: Tensor,
    packed: Tensor,
    rank: int,
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``x`` and parts to be added up: the gradients of ``U`` and ``V``, one after the other."""
    x_gradient, sums = _empty_gradients(gradient, x, thin, packed, rank)
    x, gradient = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, gradient))
    run_all(backward_launches(gradient, x, thin, packed, x_gradient, sums, rank, stride, padding), x.device)
    return x_gradient, sums


@_thin_backward.register_fake
def _traced_gradients(
    gradient: Tensor, x: Tensor, thin: Tensor, packed: Tensor, rank: int, *where: Sequence[int]
) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        builder.ask(_backward_of, x.device, gradient, x, thin, packed, rank, *map(tuple, where))
    return _empty_gradients(gradient, x, thin, packed, rank)


def _backward_of(
    gradient: Tensor, x: Tensor, thin: Tensor, packed: Tensor, rank: int, *where: Sequence[int]
) -> list[Launch]:
    empty = _empty_gradients(gradient, x, thin, packed, rank)
    return backward_launches(gradient, x, thin, packed, *empty, rank, *where)


def _empty_gradients(gradient: Tensor, x: Tensor, thin: Tensor, packed: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = x.shape
    x_gradient = x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)
    parts = max(count_splits(gradient, rank), count_splits(x, rank))
    return x_gradient, x.new_empty((parts, packed.shape[0] * rank), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, U, V, ctx.stride, ctx.padding = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, U, V, *output[1:])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, U, V, thin, packed = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients, which the kernels do not have
        return *_composed_gradients(x, U, V, gradient, ctx), None, None
    x_gradient, sums = _thin_backward(gradient, x, thin, packed, U.shape[1], ctx.stride, ctx.padding)
    dU, dV = sums.sum(0).to(U.dtype).split([U.numel(), V.numel()])  # which the compiler fuses with what follows
    return x_gradient, dU.view(U.shape), dV.view(V.shape), None, None


def _composed_gradients(x: Tensor, U: Tensor, V: Tensor, gradient: Tensor, ctx: Any) -> list[Tensor | None]:
    """Return the gradients that are needed, by operations that can be differentiated again."""
    shape = KernelShape.of((U.shape[0] // TAPS, x.shape[1], TAPS, TAPS))
    top, bottom, left, right = ctx.padding
    geometry = Geometry(tuple(ctx.stride), ((top, bottom), (left, right)), (1, 1))
    y = convolve(x, to_kernel((U @ V.mT)[None], shape).to(x.dtype), None, geometry, groups=1)
    needed = [tensor for tensor in (x, U, V) if tensor.requires_grad]
    found = iter(torch.autograd.grad(y, needed, gradient, create_graph=True))
    return [next(found) if tensor.requires_grad else None for tensor in (x, U, V)]


_thin_convolution.register_autograd(_backward, setup_context=_remember)
