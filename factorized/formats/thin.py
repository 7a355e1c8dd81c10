"""A low-rank 3×3 convolution on a GPU by custom kernels: three launches forward, three backward.

The kernels convolve along the width into a thin tensor, which has a channel per rank, and from there along the height.
The compiler's way of two matrix products (``shifted.py``) moves three times as many thin channels, in five launches
forward and ten backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from factorized._torch import is_exporting, is_known, is_traced, is_transformed, kept_by_compiler
from factorized.formats.convolution import Geometry, convolve
from factorized.formats.kernel import KernelShape, to_kernel

PLAIN = (Tensor, Parameter)  # distributed tensors and other subclasses have operators of their own
TAPS = 3
LARGEST_RANK = 32  # above it, the compiler's matrix products were faster
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)  # of GPUs whose tensor cores support bfloat16
PACKED_AT_ONCE = 1024


@dataclass(frozen=True)
class Tiles:
    """What one program of the kernels handles."""

    positions: int = 128
    outputs: int = 64
    inputs: int = 64
    sum_positions: int = 64  # at a time
    sum_wide: int = 64
    sum_thin: int = 64
    programs: int = 132  # at least, where possible; not the GPU's number, so that sums have one order on all GPUs
    warps: int = 4
    stages: int = 3


TILES = Tiles()


def applies(x: Tensor, U: Tensor, V: Tensor, shape: KernelShape, geometry: Geometry) -> bool:
    """Return whether the kernels can run a convolution: 3×3, channels-last, in half precision, on a recent GPU.

    A size that is not known while compiling is not one for the kernels, so that it needs no guard.
    """
    return x.is_cuda and suits(x, U, V, shape, geometry) and not is_transformed() and can_build_kernels(x.device)


def suits(x: Tensor, U: Tensor, V: Tensor, shape: KernelShape, geometry: Geometry) -> bool:
    """Return whether a convolution is one for the kernels, on whatever device."""
    return (
        type(x) in PLAIN
        and type(U) in PLAIN
        and type(V) in PLAIN
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
    """Return the type that a convolution of ``x`` computes in: that of autocast, where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@kept_by_compiler
def can_build_kernels(device: torch.device) -> bool:
    """Return whether there is Triton, and a GPU that has what the kernels need."""
    if find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


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
    from factorized.formats.thin_kernels import convolve_kernel, pack_kernel

    y, thin, packed = _empty_results(x, U, V, stride, padding)
    x = x.contiguous(memory_format=torch.channels_last)
    own_U, own_V = packed.split([len(U), len(V)])
    first = _Line(x, own_V, thin, _by_thin(own_V), stride[1], padding[2], along_height=False)
    second = _Line(thin, own_U, y, _by_wide(own_U), stride[0], padding[0], along_height=True)
    with _device(x):
        grid = (-(-packed.numel() // PACKED_AT_ONCE),)
        sizes = (len(U), len(packed), U.shape[1], packed.shape[1])
        pack_kernel[grid](U.contiguous(), V.contiguous(), packed, *sizes, SIZE=PACKED_AT_ONCE)
        for line in (first, second):
            convolve_kernel[(line.programs,)](*line.arguments, **line.constants, **_launching())
    return y, thin, packed


@_thin_convolution.register_fake
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
    from factorized.formats.thin_kernels import gradients_kernel

    x, gradient = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, gradient))
    thin_gradient, x_gradient = torch.empty_like(thin), torch.empty_like(x)
    own_U, own_V = packed.split([gradient.shape[1] * TAPS, x.shape[1] * TAPS])
    splits = max(_splits(gradient, rank), _splits(x, rank))
    sums = x.new_empty((splits, len(packed) * rank), dtype=torch.float32)
    lines = [
        _Line(gradient, own_U, thin_gradient, _by_thin(own_U), stride[0], padding[0], True, transposed=True),
        _Line(thin_gradient, own_V, x_gradient, _by_wide(own_V), stride[1], padding[2], False, transposed=True),
    ]
    sides = [
        _Sum(gradient, thin, sums, rank, transposed=False),
        _Sum(x, thin_gradient, sums[:, len(own_U) * rank :], rank, transposed=True),
    ]
    with _device(x):
        for line, side in zip(lines, sides, strict=True):
            grid = (line.programs + side.programs,)
            arguments = (*line.arguments, *side.arguments)
            gradients_kernel[grid](*arguments, **line.constants, **side.constants, **_launching())
    return x_gradient, sums


@_thin_backward.register_fake
def _empty_gradients(
    gradient: Tensor,
    x: Tensor,
    thin: Tensor,
    packed: Tensor,
    rank: int,
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = x.shape
    x_gradient = x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)
    splits = max(_splits(gradient, rank), _splits(x, rank))
    return x_gradient, x.new_empty((splits, packed.shape[0] * rank), dtype=torch.float32)


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


@dataclass(frozen=True)
class _Line:
    """One launch of a convolution along the height or the width."""

    x: Tensor
    weight: Tensor
    y: Tensor
    strides: tuple[int, int, int]  # of the weight, by tap, input and output
    stride: int
    padding: int
    along_height: bool
    transposed: bool = False

    @property
    def positions(self) -> int:
        return self.y.numel() // self.y.shape[1]

    @property
    def programs(self) -> int:
        constants = self.constants
        return -(-self.positions // constants["BM"]) * -(-self.y.shape[1] // constants["BN"])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            *(self.x, self.weight, self.y),
            *(self.positions, *self.y.shape[2:], *self.x.shape[2:], self.x.shape[1], self.y.shape[1]),
            *(*self.strides, self.stride, self.padding),
        )

    @property
    def constants(self) -> dict[str, Any]:
        outputs, positions = _power(self.y.shape[1], TILES.outputs), TILES.positions
        while positions > 32 and -(-self.positions // positions) * -(-self.y.shape[1] // outputs) < TILES.programs:
            positions //= 2
        return {
            "ALONG_HEIGHT": self.along_height,
            "TRANSPOSED": self.transposed,
            "TAPS": TAPS,
            "BM": positions,
            "BN": outputs,
            "BC": _power(self.x.shape[1], TILES.inputs),
        }


@dataclass(frozen=True)
class _Sum:
    """The part of a launch that computes a factor's gradient."""

    wide: Tensor
    thin: Tensor
    sums: Tensor  # (splits, at least the entries of the factor)
    rank: int
    transposed: bool

    @property
    def tiles(self) -> int:
        constants = self.constants
        return -(-self.wide.shape[1] // constants["GW"]) * -(-self.rank // constants["GR"])

    @property
    def programs(self) -> int:
        return len(self.sums) * self.tiles

    @property
    def arguments(self) -> tuple[Any, ...]:
        positions = self.wide.numel() // self.wide.shape[1]
        at_a_time = TILES.sum_positions
        span = -(-positions // (len(self.sums) * at_a_time)) * at_a_time
        return (
            *(
                self.wide,
                self.thin,
                self.sums,
                self.programs,
                span,
                positions,
                *self.wide.shape[2:],
                *self.thin.shape[2:],
            ),
            *(self.wide.shape[1], self.thin.shape[1], self.rank, self.sums.stride(0), self.rank, TAPS * self.rank),
        )

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "SEEN_TRANSPOSED": self.transposed,
            "GM": TILES.sum_positions,
            "GW": _power(self.wide.shape[1], TILES.sum_wide),
            "GR": _power(self.rank, TILES.sum_thin),
        }


def _splits(wide: Tensor, rank: int) -> int:
    """Return into how many parts the positions of ``wide`` are split for the sums of a factor's gradient."""
    tiles = _Sum(wide, wide, wide, rank, transposed=False).tiles
    positions = wide.numel() // wide.shape[1]
    return max(1, min(TILES.programs // tiles, positions // TILES.sum_positions))


def _by_thin(factor: Tensor) -> tuple[int, int, int]:
    """Return the strides of a factor (wide·taps, rank) by tap, input and output if its outputs are thin."""
    rank = factor.shape[1]
    return rank, TAPS * rank, 1


def _by_wide(factor: Tensor) -> tuple[int, int, int]:
    """Return the strides of a factor (wide·taps, rank) by tap, input and output if its inputs are thin."""
    rank = factor.shape[1]
    return rank, 1, TAPS * rank


def _power(extent: int, largest: int) -> int:
    """Return the smallest power of two that spans ``extent``, from 16 up to ``largest``."""
    return min(largest, max(16, 1 << (extent - 1).bit_length()))


def _launching() -> dict[str, int]:
    return {"num_warps": TILES.warps, "num_stages": TILES.stages}


def _device(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else torch.autograd.profiler.record_function("interpreted")
