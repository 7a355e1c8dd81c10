"""The one place that turns convolution kernels into matrices and back.

A kernel (out, in/groups, *size) becomes, per group, a matrix whose rows are output channels with the first ``row_dims``
spatial dimensions and whose columns are input channels with the others (section 2.2 of the paper, for two dimensions
and ``row_dims=1``: (out·kh) × (in·kw)). Linear and embedding weights are kernels without spatial dimensions.

The factors of all groups are stacked by rows, so that they stay two-dimensional with the long side first:
``U`` is (out·row taps, rank), ``V`` is (in·column taps, rank), an inner matrix is (groups·rank, rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor

from factorized._checks import check_choice

Kind = Literal["spatial", "channel"]
KINDS = ("spatial", "channel")


class View(NamedTuple):
    """How a factor is read as a kernel: the extents that it is reshaped to, then the order of these dimensions."""

    extents: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class KernelShape:
    """The shape of a kernel and of the matrix it is read as."""

    out_channels: int
    in_channels: int
    size: tuple[int, ...] = ()  # the spatial dimensions, empty for linear and embedding weights
    groups: int = 1
    row_dims: int = 0  # how many of the leading spatial dimensions belong to the rows, and so to U
    row_view: View = field(init=False, compare=False, repr=False)  # of ``U`` as a kernel
    column_view: View = field(init=False, compare=False, repr=False)  # of ``V``

    def __post_init__(self) -> None:
        dims, g = len(self.size), self.groups
        rows = (self.out_channels, *self.row_size, *(1,) * (dims - self.row_dims), -1)
        columns = (self.in_channels // g, *(1,) * self.row_dims, *self.column_size, -1)
        taps = range(1, dims + 1)
        row_view = View(rows, (0, dims + 1, *taps))
        column_view = View(columns, (dims + 1, 0, *taps))
        if g > 1:
            column_view = View((g, *columns), (0, *[d + 1 for d in column_view.order]))
        object.__setattr__(self, "row_view", row_view)
        object.__setattr__(self, "column_view", column_view)

    @staticmethod
    def of(weight_shape: Sequence[int], groups: int = 1, kind: Kind = "spatial") -> KernelShape:
        """Return the shape for a weight (out, in/groups, *size), split as ``kind`` says.

        ``"spatial"`` gives half of the spatial dimensions to each factor (in three dimensions: time to ``U``, height
        and width to ``V``); ``"channel"`` gives all of them to ``V``.
        """
        if min(weight_shape) < 1:
            raise ValueError(f"every size of a weight must be at least 1, got {tuple(weight_shape)}")
        out_channels, in_per_group, *size = weight_shape
        check_choice("kind", kind, KINDS)
        row_dims = len(size) // 2 if kind == "spatial" else 0
        return KernelShape(out_channels, in_per_group * groups, tuple(size), groups, row_dims)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The dense weight: (out, in/groups, *size)."""
        return (self.out_channels, self.in_channels // self.groups, *self.size)

    @property
    def row_size(self) -> tuple[int, ...]:
        """The spatial dimensions that ``U`` spans."""
        return self.size[: self.row_dims]

    @property
    def column_size(self) -> tuple[int, ...]:
        """The spatial dimensions that ``V`` spans."""
        return self.size[self.row_dims :]

    @property
    def rows(self) -> int:
        """Rows of one group's matrix."""
        return self.out_channels // self.groups * prod(self.row_size)

    @property
    def columns(self) -> int:
        """Columns of one group's matrix."""
        return self.in_channels // self.groups * prod(self.column_size)

    @property
    def full_rank(self) -> int:
        """The rank above which a factorization is overcomplete."""
        return min(self.rows, self.columns)

    @property
    def numel(self) -> int:
        """Entries of the dense weight."""
        return prod(self.weight_shape)

    def __str__(self) -> str:
        return "x".join(str(extent) for extent in self.weight_shape)


def to_matrix(
    kernel: Tensor,  # (..., out, in/groups, *size)
    shape: KernelShape,
) -> Tensor:  # (..., groups, rows, columns)
    """Read kernels as one matrix per group."""
    spatial = len(shape.size)
    batch = kernel.dim() - 2 - spatial
    split = kernel.unflatten(batch, (shape.groups, shape.out_channels // shape.groups))
    row_dims = range(batch + 3, batch + 3 + shape.row_dims)
    column_dims = range(batch + 3 + shape.row_dims, batch + 3 + spatial)
    ordered = split.permute(*range(batch + 2), *row_dims, batch + 2, *column_dims)
    return ordered.reshape(*kernel.shape[:batch], shape.groups, shape.rows, shape.columns)


def to_kernel(
    matrix: Tensor,  # (..., groups, rows, columns)
    shape: KernelShape,
) -> Tensor:  # (..., out, in/groups, *size)
    """Undo ``to_matrix``."""
    leading = matrix.shape[:-3]
    batch = len(leading)
    inputs = shape.in_channels // shape.groups
    ordered = matrix.reshape(*leading, shape.out_channels, *shape.row_size, inputs, *shape.column_size)
    row_dims = range(batch + 1, batch + 1 + shape.row_dims)
    column_dims = range(batch + 2 + shape.row_dims, batch + 2 + len(shape.size))
    return ordered.permute(*range(batch + 1), batch + 1 + shape.row_dims, *row_dims, *column_dims)


def grouped(
    factor: Tensor,  # (..., groups·long, rank)
    groups: int,
) -> Tensor:  # (..., groups, long, rank)
    """View a stacked factor as a batch over groups."""
    return factor.unflatten(-2, (groups, factor.shape[-2] // groups))


def row_kernel(
    U: Tensor,  # (out·row taps, rank)
    shape: KernelShape,
) -> Tensor:  # (out, rank, *row_size, 1…)
    """Return the kernel of the convolution groups·rank → out that ``U`` stands for: the second of the two."""
    extents, order = shape.row_view
    return U.reshape(*extents).permute(*order)


def column_kernel(
    V: Tensor,  # (in·column taps, rank)
    shape: KernelShape,
) -> Tensor:  # (groups·rank, in/groups, 1…, *column_size)
    """Return the kernel of the convolution in → groups·rank that ``V`` stands for: the first of the two."""
    extents, order = shape.column_view
    kernel = V.reshape(*extents).permute(*order)
    return kernel if shape.groups == 1 else kernel.flatten(0, 1)


def inner_kernel(
    M: Tensor,  # (groups·rank, rank)
    shape: KernelShape,
) -> Tensor:  # (groups·rank, rank, 1…)
    """Return the pointwise kernel groups·rank → groups·rank that an inner matrix stands for."""
    return M[(..., *(None,) * len(shape.size))]
