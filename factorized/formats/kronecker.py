"""Sums of Kronecker products ``W = Σ A_k ⊗ B_k``, each of a small matrix and a small kernel (Van Loan, 1993)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from torch import Tensor

from factorized._checks import check_whole, is_whole
from factorized.formats.cost import POSITIONS, Device
from factorized.formats.folding import near_root
from factorized.formats.format import Cores, Format, Rank, Way
from factorized.formats.frobenius import compose, frobenius_gradients, frobenius_norm_squared
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme, scaled_rank
from factorized.formats.svd import method_of, spectral_factors, truncated_factors


@dataclass(frozen=True)
class KroneckerFormat(Format):
    """``A`` (rank, *outer) and ``B`` (rank, out/outer, in/outer · taps); it runs as its composed weight.

    Rearranged into a matrix with a row per entry of ``A_k`` and a column per entry of ``B_k``, the weight is a product
    of this rank. So an SVD gives its best approximation, and Gram matrices give its norm.
    """

    shape: KernelShape
    outer: tuple[int, int]  # rows and columns of every ``A_k``
    rank: int

    name: ClassVar[str] = "kronecker"

    def __post_init__(self) -> None:
        check_whole("rank", self.rank)
        out, inputs = self.shape.weight_shape[:2]
        if len(self.outer) != 2 or min(self.outer) < 1 or out % self.outer[0] or inputs % self.outer[1]:
            raise ValueError(f"outer must divide the outputs and inputs of a {self.shape} weight, got {self.outer}")

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of every ``B_k``."""
        out, inputs, *size = self.shape.weight_shape
        return (out // self.outer[0], inputs // self.outer[1], *size)

    @property
    def full_rank(self) -> int:
        """The rank at which the sum can be any weight."""
        return min(prod(self.outer), prod(self.inner))

    @property
    def cores(self) -> dict[str, tuple[int, ...]]:
        """All ``A_k``, then all ``B_k``, as matrices: torch cannot put a stack of kernels into ``channels_last``."""
        out, *rest = self.inner
        return {"A": (self.rank, *self.outer), "B": (self.rank, out, prod(rest))}

    def decompose(
        self,
        weights: Tensor,  # (..., out, in/groups, *size)
        *,
        exact: bool = False,
    ) -> Cores:
        """Return the best sum of this many Kronecker products: an SVD of the rearranged weight."""
        lead = weights.shape[: weights.dim() - len(self.shape.weight_shape)]
        (rows, columns), (out, inputs, *_) = self.outer, self.inner
        blocks = weights.reshape(*lead, rows, out, columns, inputs, -1).transpose(-4, -3)
        U, V = spectral_factors(blocks.reshape(*lead, rows * columns, -1), self.rank, method_of(exact))
        return U.mT.reshape(*lead, *self.cores["A"]), V.mT.reshape(*lead, *self.cores["B"])

    def compose(self, cores: Sequence[Tensor]) -> Tensor:  # (..., out, in/groups, *size)
        """Multiply, and put the entries back in the weight's order."""
        U, V = self._as_product(cores)
        (rows, columns), (out, inputs, *_) = self.outer, self.inner
        rearranged = compose(U, V)
        lead = rearranged.shape[:-2]
        blocks = rearranged.reshape(*lead, rows, columns, out, inputs, -1).transpose(-4, -3)
        return blocks.reshape(*lead, *self.shape.weight_shape)

    def truncate(self, cores: Sequence[Tensor], target: Format) -> Cores:
        """Return the best sum of fewer products, without forming the weight."""
        U, V = truncated_factors(*self._as_product(cores), target.height)
        lead = U.shape[:-2]
        return tuple(
            factor.mT.reshape(*lead, *extents) for factor, extents in zip((U, V), target.cores.values(), strict=True)
        )

    def norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Return the squared norm from rank × rank Gram matrices."""
        return frobenius_norm_squared(*self._as_product(cores))

    def gradients(self, cores: Sequence[Tensor]) -> Cores:
        """Return the gradients of half the squared norm, as for any product."""
        dU, dV, _ = frobenius_gradients(*self._as_product(cores))
        return dU.mT.reshape(cores[0].shape), dV.mT.reshape(cores[1].shape)

    def _as_product(self, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # (..., entries, rank) each
        A, B = cores
        return A.flatten(-2).mT, B.flatten(-2).mT

    @property
    def compose_macs(self) -> int:
        """Multiply-accumulates of the product."""
        return self.shape.numel * self.rank

    def ways(self, stride: tuple[int, ...], device: Device, compiled: bool) -> dict[Way, float]:
        """Return the cost of the composed weight, the only way to run."""
        return {"composed": self.shape.numel + self.compose_macs / POSITIONS}

    def raised(self) -> list[KroneckerFormat]:
        """Return one more product, if it adds anything."""
        return [replace(self, rank=self.rank + 1)] if self.rank < self.full_rank else []

    def describe(self) -> str:
        """Return the shape of the outer factors and how many there are."""
        return f"format=kronecker, outer={self.outer}, rank={self.rank}"


@dataclass(frozen=True, repr=False)
class Kronecker(Scheme):
    """A weight as a sum of Kronecker products of a small matrix and a small kernel.

    ``outer`` is the shape of the small matrices. It must divide outputs and inputs; the default is the largest divisors
    up to their square roots. At a rank scale there are ``round(scale · full rank)`` products, at least 1.

    Raises:
        ValueError: ``outer`` is not a tuple of two whole numbers of at least 1.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> model = fz.factorize(model, fz.Kronecker(outer=(8, 8)), rank=4, keep_first_and_last=False)
        >>> {name: tuple(core.shape) for name, core in model[0].named_parameters()}
        {'A': (4, 8, 8), 'B': (4, 8, 8), 'bias': (64,)}
    """

    outer: tuple[int, int] | None = None

    name: ClassVar[str] = "kronecker"
    formats: ClassVar[tuple[type[Format], ...]] = (KroneckerFormat,)

    def __post_init__(self) -> None:
        outer: object = self.outer
        if outer is not None and not (isinstance(outer, tuple) and len(outer) == 2 and all(map(is_whole, outer))):
            raise ValueError(f"outer must be a tuple of two whole numbers of at least 1, got {outer!r}")

    def at_scale(self, shape: KernelShape, scale: float) -> KroneckerFormat:
        """Return the format at a rank scale, at most full."""
        one = self._one(shape)
        return replace(one, rank=min(scaled_rank(one.full_rank, scale), one.full_rank))

    def at_rank(self, shape: KernelShape, rank: Rank) -> KroneckerFormat:
        """Return the format of this many products; raise above full rank."""
        one = self._one(shape)
        if not isinstance(rank, int) or not 1 <= rank <= one.full_rank:
            raise ValueError(f"rank must be in 1..{one.full_rank} for {one.outer} ⊗ {one.inner}, got {rank}")
        return replace(one, rank=rank)

    def reference(self, shape: KernelShape) -> int:
        """Return the full rank."""
        return self._one(shape).full_rank

    def _one(self, shape: KernelShape) -> KroneckerFormat:
        out, inputs = shape.weight_shape[:2]
        return KroneckerFormat(shape, self.outer or (near_root(out), near_root(inputs)), 1)
