"""Convolving with a kernel: geometry, padding in torch's modes, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from factorized._torch import is_jit_tracing, is_traced, is_transformed

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # layouts, by dimensions of an input
# Entries of a kernel: torch copies a smaller one in less time than it takes to avoid that
LARGE_KERNEL = 20_000
_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over its input; every tuple has one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after
    dilation: tuple[int, ...]
    padding_mode: str = "zeros"
    output_padding: tuple[int, ...] = ()  # for transposed convolutions only
    even_padding: tuple[int, ...] | None = field(init=False, compare=False, repr=False)  # None: done beforehand
    strided: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        even = self.padding_mode == "zeros" and all(before == after for before, after in self.padding)
        object.__setattr__(self, "even_padding", tuple([before for before, _ in self.padding]) if even else None)
        object.__setattr__(self, "strided", any(stride > 1 for stride in self.stride))

    @property
    def unpadded(self) -> Geometry:
        """The same geometry for an input that is already padded."""
        return replace(self, padding=((0, 0),) * len(self.padding), padding_mode="zeros")

    def only(self, spans: tuple[int, ...]) -> Geometry:
        """Keep these spatial dimensions and make the others those of a pointwise convolution."""
        if torch.compiler.is_compiling():  # it warns about caches
            return _restricted(self, spans)
        return _remembered(self, spans)


def _restricted(geometry: Geometry, spans: tuple[int, ...]) -> Geometry:
    kept = [d in spans for d in range(len(geometry.stride))]
    return Geometry(
        stride=tuple([s if keep else 1 for s, keep in zip(geometry.stride, kept, strict=True)]),
        padding=tuple([p if keep else (0, 0) for p, keep in zip(geometry.padding, kept, strict=True)]),
        dilation=tuple([d if keep else 1 for d, keep in zip(geometry.dilation, kept, strict=True)]),
        padding_mode=geometry.padding_mode,
        output_padding=tuple([p if d in spans else 0 for d, p in enumerate(geometry.output_padding)]),
    )


_remembered = lru_cache(maxsize=256)(_restricted)


def explicit_padding(
    padding: str | Sequence[int],
    size: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Return the padding before and after each dimension; ``"same"`` puts an odd remainder after, as torch does."""
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
    if geometry.strided and _strides_are_slices(x, kernel):
        x = pad(x, geometry.padding, geometry.padding_mode).movedim(1, -1)
        # copied, or compiled code would return another layout
        x = x[tuple([slice(None, None, stride) for stride in (1, *geometry.stride)])].contiguous().movedim(-1, 1)
        geometry = replace(geometry.unpadded, stride=(1,) * len(geometry.stride))
    padding = geometry.even_padding
    if padding is None:
        x, padding = pad(x, geometry.padding, geometry.padding_mode), (0,) * len(geometry.padding)
    last = x.dim() == kernel.dim() and is_channels_last(x)
    if last and kernel.numel() >= LARGE_KERNEL and _would_be_copied(x, kernel, padding, geometry, groups):
        return _convolve_mirrored(x, kernel, bias, padding, geometry.dilation)
    kernel = _fitted(kernel, x, groups, last)
    return _CONVOLVE[len(geometry.stride)](x, kernel, bias, geometry.stride, padding, geometry.dilation, groups)


def _would_be_copied(
    x: Tensor,  # (batch, in, *spatial)
    kernel: Tensor,  # (out, in, *size), the outputs of a tap side by side
    padding: tuple[int, ...],
    geometry: Geometry,
    groups: int,
) -> bool:
    """Return whether torch would copy the kernel, as a view of the ``V`` of a product, for longer than mirrors take."""
    size, strides = kernel.shape[2:], kernel.stride()
    return (
        type(x) is type(kernel) is Tensor
        and not is_traced()  # before anything is asked of the batch, which a compiler would guard
        and (x.numel() < kernel.numel() or max(size) == 1)
        and x.is_cpu
        and x.dtype == kernel.dtype == torch.float32
        and groups == 1
        and x.shape[1] == kernel.shape[1]
        and strides[0] == 1
        and strides[1] * kernel.shape[1] == kernel.numel()
        and not geometry.strided
        and all(
            p <= (k - 1) * d < n + 2 * p
            for n, k, d, p in zip(x.shape[2:], size, geometry.dilation, padding, strict=True)
        )
        and not (torch.is_grad_enabled() and (x.requires_grad or kernel.requires_grad))
    )


def _convolve_mirrored(
    x: Tensor,  # (batch, in, *spatial)
    kernel: Tensor,  # (out, in, *size)
    bias: Tensor | None,  # (out,)
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:  # (batch, out, *spatial)
    """Convolve by a transposed convolution between mirrors, which undo that it reverses taps; it reads ``V`` as is."""
    size = kernel.shape[2:]
    dims = [d for d, k in enumerate(size, start=2) if k > 1]
    cut = [(k - 1) * d - p for k, d, p in zip(size, dilation, padding, strict=True)]
    apply = _TRANSPOSED[len(size)]
    if not dims:
        return apply(x, kernel.transpose(0, 1), bias, 1, cut)
    return apply(x.flip(dims), kernel.transpose(0, 1), bias, 1, cut, 0, 1, dilation).flip(dims)


def convolve_transposed(
    x: Tensor,  # (batch, in, *spatial) or (in, *spatial)
    kernel: Tensor,  # (in, out/groups, *size)
    bias: Tensor | None,  # (out,)
    geometry: Geometry,
    groups: int,
) -> Tensor:  # (batch, out, *spatial)
    """Apply the transpose of ``convolve`` with the same kernel, and torch's output padding."""
    padding = tuple(before for before, _ in geometry.padding)
    settings = (geometry.stride, padding, geometry.output_padding, groups, geometry.dilation)
    kernel = _fitted(kernel, x, groups, x.dim() == kernel.dim() and is_channels_last(x))
    return _TRANSPOSED[len(geometry.stride)](x, kernel, bias, *settings)


def _strides_are_slices(
    x: Tensor,  # (batch, in, *spatial) or (in, *spatial)
    kernel: Tensor,  # (out, in/groups, *size)
) -> bool:
    """Return whether a pointwise kernel is to be applied to every so many positions, cut out beforehand.

    On CPUs torch 2.13 writes past the end of memory in the backward pass of strided pointwise convolutions of few
    channels, channels-last.
    """
    if x.is_cuda or max(kernel.shape[2:]) > 1 or not is_channels_last(x):
        return False
    # a trace is recorded with gradients and checked without: the same in both
    return is_jit_tracing() or (torch.is_grad_enabled() and (x.requires_grad or kernel.requires_grad))


def _fitted(
    kernel: Tensor,  # (out, in/groups, *size)
    x: Tensor,  # (batch, in, *spatial) or (in, *spatial)
    groups: int,
    last: bool,  # whether x has channels last
) -> Tensor:
    """Return a kernel in the layout of its input; a view of factors may look channels-last, and so would the result.

    It is copied on a CPU where gradients are computed: float64 and float16 convolutions need that for correct ones. So
    are grouped ones there, whose strides oneDNN misreads unless they are those of a new tensor, even of dimensions with
    one entry.
    """
    if last and x.is_cuda:
        return kernel
    # compilers lay kernels out, with odd strides if they are permuted, and vmap has no copies in such a layout
    last = last and not (torch.compiler.is_compiling() or is_transformed())
    # a trace is recorded with gradients and checked without: the same in both
    learns = not x.is_cuda and (is_jit_tracing() or (torch.is_grad_enabled() and kernel.requires_grad))
    if last and not learns and groups == 1:
        return kernel
    if learns or last or not kernel.is_contiguous():
        return kernel.clone(memory_format=CHANNELS_LAST[x.dim()] if last else torch.contiguous_format)
    return kernel.view(-1).view(kernel.shape)  # contiguous() would keep the strides of pointwise kernels


def is_channels_last(
    x: Tensor,  # (batch, channels, *spatial)
) -> bool:
    """Return whether the channels of a position lie side by side in memory; one position has either layout."""
    strides = x.stride()
    return len(strides) in CHANNELS_LAST and strides[1] == 1 and strides[-1] != 1 and x.shape[1] > 1
