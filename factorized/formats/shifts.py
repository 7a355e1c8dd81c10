"""The shift-and-stack between the two products of a factorized convolution, in place, with its own gradient.

A kernel tap moves a tensor by some positions. What it moves beyond an edge is dropped, and positions that it leaves
empty are zero. The parts of one stack, each moved by its column tap, are added up in a buffer with margins of zeros.
The parts of the other stack are the windows that the row taps see of the buffer, copied at once. By plain slices, the
whole first stack would be padded, and the gradient of each slice would fill a tensor with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from factorized.formats.convolution import Geometry
from factorized.formats.kernel import KernelShape

Move = tuple[int, slice, slice]  # a dimension, the positions of it that are read, and those that are written
Tap = tuple[Move, ...]


@dataclass(frozen=True)
class Shifts:
    """How the parts of one stack are moved into a sum, and copies of the sum into another stack."""

    dim: int  # over which tensors are stacked
    first_dim: int  # of the spatial dimensions in a part of a stack
    columns: tuple[Tap, ...]  # how every part of the first stack moves into the sum
    rows: tuple[Tap, ...]  # how the sum moves into every part of the second stack
    inputs: tuple[int, ...]  # spatial extents of the first stack's parts
    between: tuple[int, ...]  # of the sum
    outputs: tuple[int, ...]  # of the second stack's parts
    margins: tuple[tuple[int, int], ...]  # zeros that row taps see before and after the sum, in every dimension
    steps: tuple[tuple[int, int, int], ...]  # row taps of a dimension, and from one to the next, and between outputs

    def apply(self, stack: Tensor) -> Tensor:
        """Sum over the column taps, and stack what every row tap sees of the sum. Not differentiable."""
        parts = stack.unbind(self.dim)
        extents = [sum(pair, extent) for extent, pair in zip(self.between, self.margins, strict=True)]
        space = parts[0].new_zeros(self._shape(parts[0], extents))
        total = space
        for d, (extent, (before, after)) in enumerate(zip(self.between, self.margins, strict=True), self.first_dim):
            total = total.narrow(d, before, extent) if before or after else total
        _collect(parts, self.columns, total)
        # Every row tap sees the same memory, some positions further on.
        shape, strides = list(self._shape(parts[0], self.outputs)), list(space.stride())
        taps, between_taps = [], []
        for d, (count, from_tap, from_output) in enumerate(self.steps, self.first_dim):
            taps.append(count)
            between_taps.append(strides[d] * from_tap)
            strides[d] *= from_output
        shape[self.dim : self.dim], strides[self.dim : self.dim] = taps, between_taps
        windows = space.as_strided(shape, strides)
        if len(taps) == 1:
            return windows.contiguous()
        shape[self.dim : self.dim + len(taps)] = [len(self.rows)]
        return windows.reshape(shape)

    def transposed(self, stack: Tensor) -> Tensor:
        """Do the opposite, as the gradient needs it. Not differentiable."""
        parts = stack.unbind(self.dim)
        total = parts[0].new_zeros(self._shape(parts[0], self.between))
        _collect(parts, _reversed(self.rows), total)
        shape = list(self._shape(total, self.inputs))
        shape.insert(self.dim, len(self.columns))
        result = total.new_empty(shape)
        for target, tap in zip(result.unbind(self.dim), _reversed(self.columns), strict=True):
            source = total
            for dim, read, write in tap:
                _clear_outside(target, dim, write)
                source, target = _window(source, dim, read), _window(target, dim, write)
            target.copy_(source)
        return result

    def _shape(self, part: Tensor, extents: Sequence[int]) -> tuple[int, ...]:
        return (*part.shape[: self.first_dim], *extents, *part.shape[self.first_dim + len(extents) :])


def shift_and_stack(stack: Tensor, shifts: Shifts) -> Tensor:
    """Sum over column taps and stack over row taps; differentiable any number of times, forwards too."""
    if torch.is_grad_enabled() and stack.requires_grad:
        return _ShiftAndStack.apply(stack, shifts, False)
    return shifts.apply(stack)


class _ShiftAndStack(torch.autograd.Function):
    """A linear operation or its transpose, which is its gradient."""

    apply: ClassVar[Callable[..., Tensor]]  # torch leaves it untyped

    @staticmethod
    def forward(stack: Tensor, shifts: Shifts, transposed: bool) -> Tensor:
        return shifts.transposed(stack) if transposed else shifts.apply(stack)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Shifts, bool], output: Tensor) -> None:
        _, ctx.shifts, ctx.transposed = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _ShiftAndStack.apply(gradient, ctx.shifts, not ctx.transposed), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _ShiftAndStack.apply(tangent, ctx.shifts, ctx.transposed)


@lru_cache(maxsize=256)
def plan_shifts(
    extents: tuple[int, ...],  # spatial, of the tensors that are shifted
    shape: KernelShape,
    geometry: Geometry,
    dim: int,  # of the stacks
    first_dim: int,  # of the spatial dimensions in their parts
) -> Shifts:
    """Return the shifts of a kernel: summed over its column taps, stacked over its row taps."""
    outputs, rows = output_extents(extents, shape, geometry), shape.row_dims

    def taps(size: tuple[int, ...], offset: int) -> tuple[Tap, ...]:
        return tuple([tuple(moves(tap, offset)) for tap in kernel_taps(size)])

    def moves(tap: tuple[int, ...], offset: int) -> list[Move]:
        found = []
        for d, position in enumerate(tap, start=offset):
            stride = geometry.stride[d]
            start = position * geometry.dilation[d] - geometry.padding[d][0]  # what the first output reads
            low = min(outputs[d], max(0, -(start // stride)))  # the first output that reads from inside
            high = max(low, min(outputs[d], (extents[d] - 1 - start) // stride + 1))
            read = slice(start + low * stride, start + (high - 1) * stride + 1, stride)
            if (start, stride, outputs[d]) != (0, 1, extents[d]):
                found.append((first_dim + d, read if high > low else slice(0, 0, 1), slice(low, high, 1)))
        return found

    between = (*extents[:rows], *outputs[rows:])
    margins, steps = [(0, 0)] * len(extents), []
    for d in range(rows):
        steps.append((shape.size[d], geometry.dilation[d], geometry.stride[d]))
        count, dilation, stride = steps[d]
        before, last = geometry.padding[d][0], (outputs[d] - 1) * stride + (count - 1) * dilation
        margins[d] = (before, max(0, last + 1 - before - extents[d]))
    column_taps, row_taps = taps(shape.column_size, rows), taps(shape.row_size, 0)
    return Shifts(dim, first_dim, column_taps, row_taps, extents, between, outputs, tuple(margins), tuple(steps))


def kernel_taps(size: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the positions in a kernel of this size, in the order of its entries."""
    return list(product(*(range(extent) for extent in size)))


def output_extents(extents: Sequence[int], shape: KernelShape, geometry: Geometry) -> tuple[int, ...]:
    """Return the spatial extents of a convolution's output."""
    padded = [extent + sum(pair) for extent, pair in zip(extents, geometry.padding, strict=False)]
    outputs = tuple(
        [
            (extent - d * (k - 1) - 1) // s + 1
            for extent, k, d, s in zip(padded, shape.size, geometry.dilation, geometry.stride, strict=True)
        ]
    )
    if any(extent < 1 for extent in outputs):
        raise ValueError(
            f"the kernel does not fit its input: {shape.size} with dilation {geometry.dilation} is larger than the "
            f"padded input {tuple(padded)}"
        )
    return outputs


def _collect(parts: Sequence[Tensor], taps: Sequence[Tap], total: Tensor) -> None:
    """Add every part, moved by its tap, to a sum that is zero."""
    whole = next((place for place, tap in enumerate(taps) if not tap), None)
    if whole is not None:  # a part that is not moved
        total.copy_(parts[whole])
    for place, (part, tap) in enumerate(zip(parts, taps, strict=True)):
        if place != whole:
            target = total
            for dim, read, write in tap:
                part, target = _window(part, dim, read), _window(target, dim, write)
            target.add_(part)


def _reversed(taps: Sequence[Tap]) -> list[Tap]:
    return [tuple([(dim, write, read) for dim, read, write in tap]) for tap in taps]


def _window(tensor: Tensor, dim: int, positions: slice) -> Tensor:
    if positions.step == 1:
        return tensor.narrow(dim, positions.start, positions.stop - positions.start)  # faster than an index
    return tensor[(slice(None),) * dim + (positions,)]


def _clear_outside(tensor: Tensor, dim: int, positions: slice) -> None:
    """Fill with zeros what is outside of these positions of a dimension."""
    if positions.step != 1:
        tensor.zero_()
        return
    if positions.start > 0:
        tensor.narrow(dim, 0, positions.start).zero_()
    if positions.stop < tensor.shape[dim]:
        tensor.narrow(dim, positions.stop, tensor.shape[dim] - positions.stop).zero_()
