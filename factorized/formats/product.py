"""Products of matrices ``U M₁…M_d Vᵀ``: the paper's format, and the schemes that choose it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from factorized._checks import check_choice, check_whole
from factorized.formats.calibration import Moment, calibrated_factors, output_error, refined, regularized
from factorized.formats.convolution import Geometry
from factorized.formats.cost import POSITIONS, Device, dense_cost, two_convolutions_cost, two_products_cost
from factorized.formats.format import Adjust, Call, Cores, Fill, Format, Rank, Step, Way
from factorized.formats.frobenius import compose, frobenius_gradients, frobenius_norm_squared
from factorized.formats.kernel import (
    KINDS,
    KernelShape,
    Kind,
    column_kernel,
    grouped,
    inner_kernel,
    row_kernel,
    to_kernel,
    to_matrix,
)
from factorized.formats.scheme import LARGEST_SCALE, Scheme, Start, scaled_rank
from factorized.formats.shifted import two_products
from factorized.formats.split_kernel import refined_factors
from factorized.formats.svd import factor_spectrum, method_of, spectral_factors, truncated_factors

Variant = Literal["full", "deep", "wide"]


@dataclass(frozen=True)
class Product(Format):
    """``W = U M₁…M_d Vᵀ`` (section 2): ``U`` (out·row taps, rank), ``V`` (in·column taps, rank), ``M`` (rank, rank).

    Factors of all groups are stacked by rows. ``kernel.py`` defines the matrix that a convolution kernel is read as.
    """

    shape: KernelShape
    rank: int
    depth: int = 0  # inner matrices
    chain: tuple[Step, ...] = field(init=False, compare=False, repr=False)

    name: ClassVar[str] = "product"
    is_product: ClassVar[bool] = True
    row_core: ClassVar[str | None] = "U"

    def __post_init__(self) -> None:
        check_whole("rank", self.rank)
        check_whole("depth", self.depth, least=0)
        if self.depth > LARGEST_SCALE:
            raise ValueError(f"depth must be in 0..{LARGEST_SCALE}, got {self.depth}")
        if self.rank > LARGEST_SCALE * self.shape.full_rank:
            raise ValueError(
                f"rank must be in 1..{LARGEST_SCALE * self.shape.full_rank} for a {self.shape} weight, {LARGEST_SCALE} "
                f"times its full rank, got {self.rank}"
            )
        shape, ones = self.shape, (1,) * len(self.shape.size)
        middle = shape.groups * self.rank
        rows, columns = range(shape.row_dims), range(shape.row_dims, len(shape.size))
        column_size = (*ones[: shape.row_dims], *shape.column_size)
        row_size = (*shape.row_size, *ones[shape.row_dims :])
        steps = (
            Step(shape.in_channels, middle, column_size, shape.groups, tuple(columns)),
            *[Step(middle, middle, ones, shape.groups)] * self.depth,
            Step(middle, shape.out_channels, row_size, shape.groups, tuple(rows)),
        )
        object.__setattr__(self, "chain", steps)

    @property
    def cores(self) -> dict[str, tuple[int, ...]]:
        """``U``, the inner matrices and ``V``, in the order of the product."""
        shape = self.shape
        inner = {f"inner.{n}": (shape.groups * self.rank, self.rank) for n in range(self.depth)}
        return {
            "U": (shape.groups * shape.rows, self.rank),
            **inner,
            "V": (shape.groups * shape.columns, self.rank),
        }

    def decompose(
        self,
        weights: Tensor,  # (..., out, in/groups, *size)
        *,
        exact: bool = False,
    ) -> Cores:
        """Return spectral initializations: ``U = Ũ√Σ``, ``V = Ṽ√Σ``, and identities between them."""
        # (..., groups, rows or columns, rank)
        U, V = spectral_factors(to_matrix(weights, self.shape), self.rank, method_of(exact))
        return self.with_inner(U.flatten(-3, -2), V.flatten(-3, -2))

    def calibrate(
        self,
        weight: Tensor,  # (out, in/groups, *size)
        moments: Sequence[Moment],
    ) -> Cores:
        """Return the factors with the smallest output error, balanced, and identities between them.

        In closed form if one layer has the weight and one factor spans all taps of its inputs; else a local optimum.
        """
        if self.rank >= self.shape.full_rank:
            return self.decompose(weight)
        exact = weight.double()
        moments = [regularized(moment, exact, self.shape) for moment in moments]
        starts = [self._whitened(exact, moment) for moment in moments]
        U, V = starts[0]
        if len(moments) > 1 or not moments[0].is_exact(self.shape):
            plain = replace(self, depth=0)

            def error(factors: Sequence[Tensor]) -> float:
                return output_error(exact - plain.compose(factors), moments, self.shape).item()

            start = min(*starts, plain.decompose(exact), key=error)
            if len(moments) > 1:
                found = refined(plain.compose, start, exact, moments, self.shape)
            else:
                found = refined_factors(start[0], start[1], exact, moments[0], self.shape)
            U, V = plain.products(min(start, found, key=error))
            U, V = (factor.flatten(-3, -2) for factor in truncated_factors(U, V, self.rank))
        return self.with_inner(U.to(weight.dtype), V.to(weight.dtype))

    def _whitened(
        self,
        weight: Tensor,  # (out, in/groups, *size), in float64
        moment: Moment,
    ) -> Cores:
        """Return the two factors that are best for the moment of one side of the matrix."""
        matrix, side = to_matrix(weight, self.shape), moment.of_matrix(self.shape)
        if moment.transposed:
            V, U = calibrated_factors(matrix.mT, side, self.rank)
        else:
            U, V = calibrated_factors(matrix, side, self.rank)
        return U.flatten(-3, -2), V.flatten(-3, -2)

    def compose(self, cores: Sequence[Tensor]) -> Tensor:  # (..., out, in/groups, *size)
        """Multiply the factors."""
        U, *inner, V = cores
        if self.shape.groups == 1 and not self.shape.size:
            return compose(U, V, inner)
        U, *inner, V = self.products(cores)
        return to_kernel(compose(U, V, inner), self.shape)

    def norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Return the squared norm from Gram matrices, or from the product where that is cheaper."""
        U, *inner, V = self.products(cores)
        return frobenius_norm_squared(U, V, inner).sum(-1)

    def gradients(self, cores: Sequence[Tensor]) -> Cores:
        """Return the gradients of half the squared norm from Gram matrices, or from the product."""
        U, *inner, V = self.products(cores)
        dU, dV, d_inner = frobenius_gradients(U, V, inner)
        return tuple([gradient.flatten(-3, -2) for gradient in (dU, *d_inner, dV)])

    def products(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return the factors by group: (..., groups, long, rank)."""
        if self.shape.groups == 1:
            return [core.unsqueeze(-3) for core in cores]
        return [grouped(core, self.shape.groups) for core in cores]

    def truncate(self, cores: Sequence[Tensor], target: Format) -> Cores:
        """Return the best approximation of lower rank, without forming the product."""
        if not isinstance(target, Product):
            return super().truncate(cores, target)
        U, *inner, V = self.products(cores)
        U, V = truncated_factors(U, V, target.rank, inner)  # (..., groups, long, rank)
        return target.with_inner(U.flatten(-3, -2), V.flatten(-3, -2))

    def with_inner(self, U: Tensor, V: Tensor) -> Cores:
        """Return all cores for these outer ones, with identities between them."""
        eye = torch.eye(self.rank, dtype=U.dtype, device=U.device).repeat(self.shape.groups, 1)
        return (U, *[eye.expand(*U.shape[:-2], *eye.shape)] * self.depth, V)

    def spectrum(self, cores: Sequence[Tensor]) -> Tensor:  # (..., groups, singular values)
        """Return the singular values from an SVD no larger than the rank."""
        U, *inner, V = self.products(cores)
        return factor_spectrum(U, V, inner)

    def plus(
        self,
        cores: Sequence[Tensor],
        U: Tensor,  # (rows, r)
        V: Tensor,  # (columns, r)
    ) -> tuple[Format, Cores]:
        """Return the factors side by side, at the sum of both ranks, with identities for the new ones in between."""
        if self.shape.groups > 1:
            return super().plus(cores, U, V)
        own_U, *inner, own_V = cores
        eye = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device)
        between = [torch.block_diag(M, eye) for M in inner]
        wider = replace(self, rank=self.rank + U.shape[-1])
        return wider, (torch.cat([own_U, U], dim=-1), *between, torch.cat([own_V, V], dim=-1))

    @property
    def matrix_rank(self) -> int:
        """The rank, or full rank where that is smaller."""
        return min(self.rank, self.shape.full_rank)

    @torch.no_grad()
    def draw(self, cores: Sequence[Tensor], fill: Fill) -> None:
        """Draw ``U`` and ``Vᵀ`` of every group as if each were a layer's weight; inner matrices are identities."""
        U, *inner, V = self.products(cores)
        for factor, transposed in ((U, False), (V, True)):
            for part in factor:
                matrix = torch.empty_like(part.mT if transposed else part, memory_format=torch.contiguous_format)
                fill(matrix)
                part.copy_(matrix.mT if transposed else matrix)
        for M in inner:
            M.copy_(torch.eye(self.rank, dtype=M.dtype, device=M.device))

    def chain_weights(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return ``Vᵀ``, the inner matrices from the last on, and ``U``, as kernels."""
        U, *inner, V = cores
        if not self.shape.size:
            return [V.mT, *reversed(inner), U]
        between = [inner_kernel(M, self.shape) for M in reversed(inner)]
        return [column_kernel(V, self.shape), *between, row_kernel(U, self.shape)]

    def plain(self, cores: Sequence[Tensor]) -> list[tuple[Step, Tensor]]:
        """Return two plain layers: inner matrices are multiplied into ``U``."""
        if not self.depth:
            return super().plain(cores)
        U, *inner, _ = self.products(cores)
        for M in inner:
            U = U @ M
        return replace(self, depth=0).plain([U.flatten(-3, -2), cores[-1]])

    @property
    def compose_macs(self) -> int:
        """Multiply-accumulates of the product, with the inner matrices in the shorter factor."""
        shape = self.shape
        return shape.groups * self.rank * (shape.rows * shape.columns + self.depth * shape.full_rank * self.rank)

    def macs(self, call: Call) -> int:
        """Return the multiply-accumulates of one call as a chain, as budgets count them."""
        return super().macs(call) if call.looked_up or call.whole else self.chain_macs(call)

    def ways(self, stride: tuple[int, ...], device: Device, compiled: bool) -> dict[Way, float]:
        """Return the costs: the composed weight, two thin layers, or two matrix products with shifts between them.

        They depend on the layer and its device; on a CPU, outside of compilers, also on the layout of the input. So a
        compiled or exported program needs no guard on the batch size.
        """
        shape, composing = self.shape, self.compose_macs / POSITIONS
        if not shape.size:
            return {"chain": float(self.numel), "composed": shape.numel + composing}
        convolutions = two_convolutions_cost(shape, self.rank, self.depth, stride, device)
        products = two_products_cost(shape, self.rank, stride, device, compiled)
        dense = dense_cost(shape, device)
        return {"composed": dense + composing, "chain": convolutions, "products": products}

    def run(
        self,
        way: Way,
        x: Tensor,
        cores: Sequence[Tensor],
        bias: Tensor | None,
        geometry: Geometry | None,
        adjust: Adjust | None = None,
        transposed: bool = False,
    ) -> Tensor:
        """Apply the weight to an input."""
        if way == "products" and geometry is not None:
            U, *inner, V = cores
            return two_products(x, U, V, inner, bias, self.shape, geometry)
        return super().run(way, x, cores, bias, geometry, adjust, transposed)

    def raised(self) -> list[Product]:
        """Return the next rank up."""
        return [replace(self, rank=self.rank + 1)]

    def describe(self) -> str:
        """Return the rank, and the depth where there is one."""
        return f"rank={self.rank}" + (f", depth={self.depth}" if self.depth else "")


class _Products(Scheme):
    """Base class of the two product schemes. Abstract."""

    formats: ClassVar[tuple[type[Format], ...]] = (Product,)
    kind: Kind

    def kernel(self, weight_shape: Sequence[int], groups: int = 1) -> KernelShape:
        """Return the shape, with the matrix that ``kind`` makes of a kernel."""
        return KernelShape.of(weight_shape, groups, self.kind)

    def reference(self, shape: KernelShape) -> int:
        """Return what the rank scale multiplies: a convolution's matrix rows out·kh, a matrix's shorter side."""
        return shape.rows if shape.size else shape.full_rank


@dataclass(frozen=True, repr=False)
class LowRank(_Products):
    """``W = U Vᵀ`` with a rank below full, for smaller and faster layers (section 2).

    ``kind="spatial"`` is the paper's pair of one-dimensional convolutions; ``"channel"`` is k×k then 1×1.

    Raises:
        ValueError: ``kind`` is neither of them.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.Flatten())
        >>> fz.factorize(model, fz.LowRank(), rank_scale=0.1, keep_first_and_last=False)[0]
        FactorizedConv2d(32, 64, kernel_size=(3, 3), execution=chain, rank=19, params=5,472 of 18,432)
    """

    kind: Kind = "spatial"

    name: ClassVar[str] = "low_rank"
    by_spectrum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS, "ranks and budgets, such as ratio=0.1, are arguments of fz.factorize")

    def at_scale(self, shape: KernelShape, scale: float) -> Product:
        """Return the product at the paper's rank for ``scale``, at most full."""
        return Product(shape, min(scaled_rank(self.reference(shape), scale), shape.full_rank))

    def at_rank(self, shape: KernelShape, rank: Rank) -> Product:
        """Return the product at a rank; raise above full rank."""
        if not isinstance(rank, int) or rank > shape.full_rank:
            raise ValueError(
                f"rank must be in 1..{shape.full_rank} for a {shape} weight, got {rank}; "
                'use Overcomplete("wide") to go above full rank'
            )
        return Product(shape, rank)


@dataclass(frozen=True, repr=False)
class Overcomplete(_Products):
    """``W = U Vᵀ`` (``"full"``, ``"wide"``) or ``U M Vᵀ`` (``"deep"``) at or above full rank (section 5).

    The weight is trained as a product and deployed composed. ``"full"`` and ``"deep"`` have rank scale 1, and
    ``"wide"`` has ``width``.

    Raises:
        ValueError: ``variant``, ``width`` or ``kind`` has a wrong value.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> fz.factorize(model, fz.Overcomplete("deep"), keep_first_and_last=False)[0]
        FactorizedLinear(64, 64, bias=True, execution=composed, rank=64, depth=1, params=12,288 of 4,096)
        >>> fz.compose(model)  # after training
        Sequential(
          (0): Linear(in_features=64, out_features=64, bias=True)
        )
    """

    variant: Variant = "full"
    width: float = 3
    kind: Kind = "spatial"

    name: ClassVar[str] = "overcomplete"
    init: ClassVar[Start] = "default"
    compresses: ClassVar[bool] = False
    least_scale: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, ("full", "deep", "wide"))
        check_choice("kind", self.kind, KINDS)
        if not 1 <= self.width <= LARGEST_SCALE:
            raise ValueError(f"width must be in 1..{LARGEST_SCALE} (it multiplies full rank), got {self.width!r}")

    @property
    def depth(self) -> int:
        """Inner matrices between the factors."""
        return 1 if self.variant == "deep" else 0

    @property
    def rank_scale(self) -> float:
        """The scale to use when no budget is given."""
        return self.width if self.variant == "wide" else 1.0

    def at_scale(self, shape: KernelShape, scale: float) -> Product:
        """Return the product at the paper's rank for ``scale``, at least full."""
        return Product(shape, max(scaled_rank(self.reference(shape), scale), shape.full_rank), self.depth)

    def at_rank(self, shape: KernelShape, rank: Rank) -> Product:
        """Return the product at a rank; raise below full rank."""
        if not isinstance(rank, int) or rank < shape.full_rank:
            raise ValueError(
                f"rank must be at least {shape.full_rank}, full rank, for an overcomplete {shape} weight, got {rank}; "
                "use LowRank() for less"
            )
        return Product(shape, rank, self.depth)
