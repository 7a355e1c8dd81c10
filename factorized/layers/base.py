"""What every low-rank layer is: two factors, and inner matrices between them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Self

import torch
from torch import Tensor, nn

from factorized.layers.composed import ComposedLayer
from factorized.layers.draw import Init, draw, fill_identity
from factorized.maths.convolution import composed_kernel
from factorized.maths.kernel import KernelShape, to_matrix
from factorized.maths.spectral import spectral_factors


class FactorizedLayer(ComposedLayer):
    """A layer whose weight is the product ``U M₁…M_d Vᵀ`` (section 2 of the paper). Abstract.

    ``U`` is (groups·rows, rank), ``V`` is (groups·columns, rank), each inner matrix is (groups·rank, rank), where rows
    and columns are those of the weight's matrix (``maths/kernel.py``).
    """

    def __init__(
        self,
        shape: KernelShape,
        rank: int,
        depth: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(shape)
        check_whole("rank", rank, least=1)
        check_whole("depth", depth, least=0)
        self.U = nn.Parameter(torch.empty(shape.groups * shape.rows, rank, device=device, dtype=dtype))
        self.inner = nn.ParameterList(
            nn.Parameter(torch.empty(shape.groups * rank, rank, device=device, dtype=dtype)) for _ in range(depth)
        )
        self.V = nn.Parameter(torch.empty(shape.groups * shape.columns, rank, device=device, dtype=dtype))

    @property
    def rank(self) -> int:
        """Columns of the factors."""
        return self.U.shape[1]

    @property
    def depth(self) -> int:
        """How many inner matrices stand between the factors."""
        return len(self.inner)

    @property
    def factors(self) -> tuple[nn.Parameter, ...]:
        """Every parameter of the product, in its order: ``U``, the inner matrices, ``V``."""
        return (self.U, *self.inner, self.V)

    @property
    def weight(self) -> Tensor:
        """The composed weight, in the dense layer's shape; differentiable."""
        return composed_kernel(self.U, self.V, list(self.inner), self.shape)

    @property
    def alike(self) -> Hashable:
        """Layers of one matrix shape and rank are decomposed in one batch."""
        return self.shape, self.rank

    def decompose(
        self,
        weights: Tensor,  # (batch, out, in/groups, *size)
    ) -> tuple[Tensor, ...]:  # (batch, groups·rows, rank), (batch, groups·columns, rank)
        """Return the spectral initializations ``U`` and ``V`` of some weights, stacked over groups (section 3.1)."""
        matrices = torch.stack([to_matrix(weight, self.shape) for weight in weights])
        U, V = spectral_factors(matrices, self.rank)  # (batch, groups, rows or columns, rank)
        return U.flatten(1, 2), V.flatten(1, 2)

    @torch.no_grad()
    def set_factors(self, *factors: Tensor) -> None:
        """Copy ``U`` and ``V`` in and make the inner matrices identities."""
        U, V = factors
        self.U.copy_(U)
        self.V.copy_(V)
        for M in self.inner:
            fill_identity(M)

    @torch.no_grad()
    def draw_factors(self, init: Init) -> None:
        """Draw both factors at random and make the inner matrices identities."""
        draw(self.U, self.V, self.shape, init)
        for M in self.inner:
            fill_identity(M)

    def share_factors(self, other: Self) -> None:
        """Hold the very factors of ``other``."""
        self.U, self.V, self.inner = other.U, other.V, other.inner

    def size_repr(self) -> str:
        """Return the rank, the depth and the parameters saved, for the layer's repr."""
        depth = f", depth={self.depth}" if self.depth else ""
        used = sum(factor.numel() for factor in self.factors)
        return f"rank={self.rank}{depth}, params={used:,} of {self.shape.numel:,}"


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        quoted = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be one of {quoted}, got {value!r}")
