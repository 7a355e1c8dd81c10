"""The shift-and-stack between the two products of a factorized convolution, in place, with its own gradient.

A kernel tap moves a tensor by some positions. Shifting and stacking sums the parts of one stack, each moved by its tap,
and makes another stack of copies of the sum, each moved by its tap. The gradient does the same backwards. What a tap
moves beyond an edge is dropped, and positions that it leaves empty are zero: no tensor is padded, and no gradient of a
slice is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
    collected: tuple[Tap, ...]  # for every part of the first stack
    spread: tuple[Tap, ...]  # for every part of the second one
    first: tuple[int, ...]  # spatial extents of the first stack's parts
    between: tuple[int, ...]  # of the sum
    last: tuple[int, ...]  # of the second stack's parts

    @cached_property
    def backwards(self) -> Shifts:
        """The transposed operation."""
        collected, spread = (
            tuple([tuple([(dim, write, read) for dim, read, write in tap]) for tap in taps])
            for taps in (self.spread, self.collected)
        )
        return Shifts(self.dim, self.first_dim, collected, spread, self.last, self.between, self.first)

    def apply(self, stack: Tensor) -> Tensor:
        """Shift and stack. Not differentiable."""
        return self._spread(self._collect(stack))

    def _collect(self, stack: Tensor) -> Tensor:
        parts = list(zip(stack.unbind(self.dim), self.collected, strict=True))
        whole = next((place for place, (_, tap) in enumerate(parts) if not tap), None)
        if whole is not None:  # a tap that moves nothing
            total, _ = parts.pop(whole)
            total = total.clone() if parts else total
        else:
            total = parts[0][0].new_zeros(self._shape(parts[0][0], self.between))
        for part, tap in parts:
            target = total
            for dim, read, write in tap:
                part, target = _window(part, dim, read), _window(target, dim, write)
            target.add_(part)
        return total

    def _spread(self, total: Tensor) -> Tensor:
        if self.spread == ((),):
            return total.unsqueeze(self.dim)
        shape = list(self._shape(total, self.last))
        shape.insert(self.dim, len(self.spread))
        stack = total.new_empty(shape)
        for target, tap in zip(stack.unbind(self.dim), self.spread, strict=True):
            source = total
            for dim, read, write in tap:
                _clear_outside(target, dim, write)
                source, target = _window(source, dim, read), _window(target, dim, write)
            target.copy_(source)
        return stack

    def _shape(self, part: Tensor, extents: tuple[int, ...]) -> tuple[int, ...]:
        after = self.first_dim + len(extents)
        return (*part.shape[: self.first_dim], *extents, *part.shape[after:])


def shift_and_stack(stack: Tensor, shifts: Shifts) -> Tensor:
    """Shift and stack; differentiable any number of times, forwards too."""
    if torch.is_grad_enabled() and stack.requires_grad:
        return _ShiftAndStack.apply(stack, shifts)
    return shifts.apply(stack)


class _ShiftAndStack(torch.autograd.Function):
    """A linear operation: its gradient is the transposed one."""

    apply: ClassVar[Callable[..., Tensor]]  # torch leaves it untyped

    @staticmethod
    def forward(stack: Tensor, shifts: Shifts) -> Tensor:
        return shifts.apply(stack)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Shifts], output: Tensor) -> None:
        ctx.shifts = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return shift_and_stack(gradient, ctx.shifts.backwards), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return shift_and_stack(tangent, ctx.shifts)


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
        return tuple([tuple(moves(tap, offset)) for tap in product(*(range(k) for k in size))])

    def moves(tap: tuple[int, ...], offset: int) -> list[Move]:
        found = []
        for d, position in enumerate(tap, start=offset):
            stride = geometry.stride[d]
            start = position * geometry.dilation[d] - geometry.padding[d][0]  # what the first output reads
            low = max(0, -(start // stride))  # the first output that reads from inside
            high = max(low, min(outputs[d], (extents[d] - 1 - start) // stride + 1))
            read = slice(start + low * stride, start + (high - 1) * stride + 1, stride)
            if (start, stride, outputs[d]) != (0, 1, extents[d]):
                found.append((first_dim + d, read if high > low else slice(0, 0, 1), slice(low, high, 1)))
        return found

    between = (*extents[:rows], *outputs[rows:])
    return Shifts(dim, first_dim, taps(shape.column_size, rows), taps(shape.row_size, 0), extents, between, outputs)


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
