"""Folding a weight into a tensor of several dimensions: choosing them or checking the given ones, for any scheme."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import isqrt, prod
from typing import ClassVar

from torch import nn

from factorized._checks import is_whole
from factorized.formats.format import Format, Rank
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme, scaled_rank
from factorized.formats.separable import Separable, pointwise_shape
from factorized.formats.tensor_format import TensorFormat


@dataclass(frozen=True, repr=False)
class TensorScheme(Scheme):
    """Base class of the schemes that fold a weight into several dimensions. Abstract."""

    dims: tuple[int, ...] | None = None
    order: int | None = None
    separable: bool = False

    keeps_kernels: ClassVar[bool] = False  # convolution kernels keep their own dimensions

    def __post_init__(self) -> None:
        if isinstance(self.dims, list):
            object.__setattr__(self, "dims", tuple(self.dims))
        dims, order = self.dims, self.order
        if dims is not None and order is not None:
            raise ValueError(f"give dims or order, not both, got dims={dims!r} and order={order!r}")
        if order is not None and not is_whole(order, least=2):
            raise ValueError(f"order must be a whole number of at least 2 (dimensions to fold into), got {order!r}")
        if dims is not None and not (isinstance(dims, tuple) and len(dims) >= 2 and all(map(is_whole, dims))):
            raise ValueError(f"dims must be a tuple of at least two whole numbers of at least 1, got {dims!r}")
        if not isinstance(self.separable, bool):
            raise ValueError(f"separable must be True or False, got {self.separable!r}")

    @abstractmethod
    def smallest(self, shape: KernelShape, dims: tuple[int, ...]) -> TensorFormat:
        """Return the format of rank 1 for a weight that is folded into ``dims``."""

    def refuse(self, module: nn.Module, shape: KernelShape) -> str | None:
        """Return why a layer is left alone: separable blocks are for k×k convolutions."""
        if self.separable and (prod(shape.size) == 1 or shape.groups > 1):
            return "separable=True splits ungrouped convolutions with kernels larger than 1x1"
        return None

    def at_scale(self, shape: KernelShape, scale: float) -> Format:
        """Return the format at a rank scale: its reference ranks times the scale, at least 1 and at most full."""
        start = self._fold(shape)
        return self._whole(shape, start.clipped(_scaled(start, scale)))

    def at_rank(self, shape: KernelShape, rank: Rank) -> Format:
        """Return the format at one rank for every place, or a rank per place, clipped to what the dimensions allow."""
        return self._whole(shape, self._fold(shape).clipped(rank))

    def reference(self, shape: KernelShape) -> int:
        """Return the sum of the ranks that the rank scale multiplies."""
        return sum(self._fold(shape).reference_ranks)

    def clipped(self, shape: KernelShape, scale: float | None, rank: int | None) -> str | None:
        """Return a note on the ranks that are clipped to what the dimensions allow, or None."""
        start = self._fold(shape)
        wanted = _scaled(start, scale) if scale is not None else (rank or 1,) * len(start.full_ranks)
        found = start.clipped(wanted).rank
        return f"({shape}): {wanted} is clipped to {found}" if found != wanted else None

    def _fold(self, shape: KernelShape) -> TensorFormat:
        """Return the format of rank 1 of a weight, or of the pointwise part of a separable one.

        Chosen dimensions keep outputs and inputs apart, so that the layer can run without composing its weight. Each
        side is split in two (Tucker keeps a convolution's channels whole), and a train treats all taps of a kernel as
        one dimension. A pointwise part is folded into three nearly equal dimensions, as the paper's experiments did.
        """
        folded = pointwise_shape(shape) if self.separable else shape
        order = 3 if self.separable and self.order is None else self.order
        if self.dims is not None:
            if prod(self.dims) != folded.numel:
                raise ValueError(
                    f"dims {self.dims} multiply to {prod(self.dims):,}, but the weight {folded} has {folded.numel:,} "
                    f"entries; give dims whose product is {folded.numel:,}, or leave dims out to have them chosen"
                )
            return self.smallest(folded, self.dims)
        chosen = nearly_equal(folded.numel, order) if order is not None else _apart(folded, self.keeps_kernels)
        return self.smallest(folded, chosen)

    def _whole(self, shape: KernelShape, folded: TensorFormat) -> Format:
        return Separable(shape, folded) if self.separable else folded


def _scaled(start: TensorFormat, scale: float) -> tuple[int, ...]:
    return tuple([scaled_rank(reference, scale) for reference in start.reference_ranks])


def nearly_equal(numel: int, order: int) -> tuple[int, ...]:
    """Split ``numel`` into ``order`` factors by the paper's rule: each is the first divisor from the equal share up."""
    equal = numel ** (1 / order)
    dims = []
    for _ in range(order - 1):
        divisor = min(round(equal), numel)
        while numel % divisor:
            divisor += 1
        dims.append(divisor)
        numel //= divisor
    return (*dims, numel)


def _apart(shape: KernelShape, keeps_kernels: bool) -> tuple[int, ...]:
    out, inputs, *size = shape.weight_shape
    if keeps_kernels and size:
        return shape.weight_shape
    taps = [prod(size)] if prod(size) > 1 else []
    return (*_two_factors(out), *_two_factors(inputs), *taps)


def near_root(number: int) -> int:
    """Return the largest divisor up to the square root."""
    return next(d for d in range(isqrt(number), 0, -1) if number % d == 0)


def _two_factors(number: int) -> tuple[int, ...]:
    """Return the two factors nearest to the square root, the smaller one first; a prime number stays whole."""
    smaller = near_root(number)
    return (smaller, number // smaller) if smaller > 1 else (number,)
