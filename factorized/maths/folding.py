"""Folding a weight into a tensor of several dimensions: choosing them, or checking the given ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt, prod

from factorized.maths.kernel import KernelShape
from factorized.maths.tensor_format import TensorFormat
from factorized.maths.tensor_train import TrainFormat, full_train_ranks, raised_train_ranks, reachable_train_ranks
from factorized.maths.tucker import CoreKind, TuckerFormat, raised_tucker_ranks, reachable_tucker_ranks

METHODS = ("tensor_train", "tucker")
Rank = int | tuple[int, ...]


@dataclass(frozen=True)
class Folding:
    """A weight (out, in/groups, *size), read in its order of memory as a tensor of other dimensions, for one method."""

    shape: KernelShape
    dims: tuple[int, ...]
    method: str = "tensor_train"
    core: CoreKind = "whole"
    refinements: int = 0
    # How many of the dimensions make up the output channels; None where they mix with the input's.
    boundary: int | None = field(init=False, compare=False, repr=False)
    # How many trailing dimensions are those of the kernel, which a Tucker tensor keeps whole.
    kept: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ends = [k for k in range(1, len(self.dims)) if prod(self.dims[:k]) == self.shape.out_channels]
        object.__setattr__(self, "boundary", ends[0] if ends else None)
        count = len(self.shape.size)
        aligned = self.method == "tucker" and len(self.dims) > count and self.dims[-count:] == self.shape.size
        object.__setattr__(self, "kept", count if count and aligned else 0)

    @property
    def full_ranks(self) -> tuple[int, ...]:
        """The ranks at which the format holds any weight."""
        if self.method == "tensor_train":
            return full_train_ranks(self.dims)
        return self._reachable(self.dims[: len(self.dims) - self.kept])

    @property
    def reference_ranks(self) -> tuple[int, ...]:
        """What a rank scale multiplies: of a train the smaller of two neighbouring dimensions, of Tucker full rank."""
        if self.method == "tensor_train":
            return tuple([min(pair) for pair in zip(self.dims, self.dims[1:], strict=False)])
        return self.full_ranks

    def ranks_at(self, scale: float) -> tuple[int, ...]:
        """Return the ranks at a scale, rounded, at least 1; not clipped."""
        return tuple([max(1, round(scale * reference)) for reference in self.reference_ranks])

    def clipped(self, rank: Rank) -> tuple[int, ...]:
        """Return one rank per place, none above what the format allows; raise unless they are whole and positive."""
        full = self.full_ranks
        ranks = tuple(rank) if isinstance(rank, (tuple, list)) else (rank,) * len(full)
        if len(ranks) != len(full):
            raise ValueError(
                f"rank must be one whole number or {len(full)} of them for dims {self.dims} ({self.method}), "
                f"got {rank!r}"
            )
        if not all(_is_count(number) for number in ranks):
            raise ValueError(
                f"rank must be a whole number of at least 1, up to {full} for dims {self.dims} ({self.method}), "
                f"got {rank!r}"
            )
        return self._reachable([min(pair) for pair in zip(ranks, full, strict=True)])

    def raised(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the next ranks up: each that is not full one higher, and with it the others that this takes."""
        full = self.full_ranks
        places = [place for place in range(len(ranks)) if ranks[place] < full[place]]
        if self.method == "tensor_train":
            return [raised_train_ranks(self.dims, ranks, place) for place in places]
        return [raised_tucker_ranks(ranks, full, self._kept_numel, place) for place in places]

    def lowered(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the next ranks down: each above 1 one lower, and with it the others that need it."""
        places = [place for place in range(len(ranks)) if ranks[place] > 1]
        return [self._reachable([rank - (k == place) for k, rank in enumerate(ranks)]) for place in places]

    def _reachable(self, ranks: Sequence[int]) -> tuple[int, ...]:
        if self.method == "tensor_train":
            return reachable_train_ranks(self.dims, ranks)
        return reachable_tucker_ranks(ranks, self._kept_numel)

    @property
    def _kept_numel(self) -> int:
        return prod(self.dims[len(self.dims) - self.kept :])

    def format(self, rank: Rank) -> TensorFormat:
        """Return the format of these dimensions at a rank, clipped to what is allowed."""
        ranks = self.clipped(rank)
        if self.method == "tensor_train":
            return TrainFormat(self.dims, ranks)
        return TuckerFormat(self.dims, ranks, self.kept, self.core, self.refinements)


def fold(
    shape: KernelShape,
    method: str = "tensor_train",
    dims: Sequence[int] | None = None,
    order: int | None = None,
    core: CoreKind | None = None,
    refinements: int = 0,
    separable: bool = False,
) -> Folding:
    """Return the folding of a weight: of the given ``dims``, into ``order`` nearly equal ones, or chosen.

    Chosen dimensions keep outputs and inputs apart, so that the layer can be contracted with its input: each side is
    split in two (Tucker leaves the channels of a convolution whole), and a train has all taps of a kernel as one.
    ``separable`` folds the pointwise matrix of a separable block instead, as the paper's experiments did: into three
    nearly equal dimensions, and a Tucker core is a train.
    """
    check_folding(method, dims, order, core, refinements)
    if min(shape.weight_shape) < 1:
        raise ValueError(f"a weight to decompose must have at least one entry in every dimension, got {shape}")
    if separable:
        shape = pointwise_shape(shape)
        order = 3 if dims is None and order is None else order
    core = core or ("train" if separable and method == "tucker" else "whole")
    if dims is not None:
        chosen = tuple(dims)
        if prod(chosen) != shape.numel:
            raise ValueError(
                f"dims {chosen} multiply to {prod(chosen):,}, but the weight {shape} has {shape.numel:,} entries; give "
                f"dims whose product is {shape.numel:,}, or none to have them chosen"
            )
    elif order is not None:
        chosen = nearly_equal(shape.numel, order)
    else:
        chosen = _apart(shape, method)
    return Folding(shape, chosen, method, core, refinements)


def pointwise_shape(shape: KernelShape) -> KernelShape:
    """Return the shape of the pointwise part of a separable block; raise where there is nothing to separate."""
    if shape.groups > 1 or prod(shape.size) == 1:
        raise ValueError(
            f"separable=True splits a convolution over space from one over channels: it needs a kernel larger than one "
            f"position and groups=1, got {shape} and groups={shape.groups}"
        )
    return KernelShape.of((shape.out_channels, shape.in_channels, *[1] * len(shape.size)))


def check_folding(
    method: str, dims: Sequence[int] | None, order: int | None, core: str | None = None, refinements: int = 0
) -> None:
    """Raise unless the method is known and what is given for it makes sense."""
    if method not in METHODS:
        raise ValueError(f'method must be "tensor_train" or "tucker", got {method!r}')
    if core not in (None, "whole", "train"):
        raise ValueError(f'core must be "whole" or "train", got {core!r}')
    if not _is_count(refinements, least=0):
        raise ValueError(f"refinements must be a whole number of at least 0, got {refinements!r}")
    if method == "tensor_train" and (core == "train" or refinements):
        raise ValueError(
            f'core="train" and refinements are for method="tucker", got core={core!r} and refinements={refinements!r} '
            "for a tensor train; leave them out"
        )
    if dims is not None and order is not None:
        raise ValueError(f"give dims or order, not both, got dims={dims!r} and order={order!r}")
    if order is not None and not _is_count(order, least=2):
        raise ValueError(f"order must be a whole number of at least 2 (dimensions to fold into), got {order!r}")
    if dims is not None and not (isinstance(dims, (tuple, list)) and len(dims) >= 2 and all(map(_is_count, dims))):
        raise ValueError(f"dims must be a tuple of at least two whole numbers of at least 1, got {dims!r}")


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def nearly_equal(numel: int, order: int) -> tuple[int, ...]:
    """Split ``numel`` into ``order`` factors: the paper's rule, each the next divisor from the equal share upwards."""
    equal = numel ** (1 / order)
    dims = []
    for _ in range(order - 1):
        divisor = min(round(equal), numel)
        while numel % divisor:
            divisor += 1
        dims.append(divisor)
        numel //= divisor
    return (*dims, numel)


def _apart(shape: KernelShape, method: str) -> tuple[int, ...]:
    out, inputs, *size = shape.weight_shape
    if method == "tucker" and size:
        return shape.weight_shape
    taps = [prod(size)] if prod(size) > 1 else []
    return (*_two_factors(out), *_two_factors(inputs), *taps)


def _two_factors(number: int) -> tuple[int, ...]:
    """Return the two factors nearest to the square root, the smaller one first; a prime number stays whole."""
    smaller = next(d for d in range(isqrt(number), 0, -1) if number % d == 0)
    return (smaller, number // smaller) if smaller > 1 else (number,)
