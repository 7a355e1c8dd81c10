"""Monarch matrices: two block-diagonal matrices with a fixed permutation between them (Dao et al., 2022).

``W = L P R``, generalized to rank r per block so that budgets can be met: ``W`` is cut into blocks × blocks, each of
rank r. With one block it is low rank. ``P`` is ``nn.ChannelShuffle``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import ClassVar

from torch import Tensor, nn

from factorized._checks import check_whole
from factorized.formats.cost import POSITIONS, TRAFFIC, Device
from factorized.formats.format import Cores, Format, Rank, Step, Way
from factorized.formats.frobenius import compose, frobenius_gradients, frobenius_norm_squared
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme, scaled_rank
from factorized.formats.svd import method_of, spectral_factors

# One step of the rank changes a layer by at most this share of its dense size, unless blocks are given.
FINEST = 0.03


@dataclass(frozen=True)
class MonarchFormat(Format):
    """``L`` (out, blocks·rank) and ``R`` (blocks·rank·blocks, in/blocks, *size), block-diagonal: 1×1 after k×k.

    The rows of ``R`` are ordered by (column block, rank, row block).
    """

    shape: KernelShape
    blocks: int
    rank: int
    chain: tuple[Step, ...] | None = field(init=False, compare=False, repr=False)

    name: ClassVar[str] = "monarch"
    keeps_zero_rows: ClassVar[bool] = True  # they are rows of the second block-diagonal matrix

    def __post_init__(self) -> None:
        check_whole("rank", self.rank)
        check_whole("blocks", self.blocks)
        shape, blocks = self.shape, self.blocks
        if shape.out_channels % blocks or shape.weight_shape[1] % blocks:
            raise ValueError(f"blocks must divide the outputs and inputs of a {shape} weight, got {blocks}")
        if self.rank > full_rank(shape, blocks):
            raise ValueError(
                f"rank must be in 1..{full_rank(shape, blocks)} for {blocks}x{blocks} blocks of a {shape} weight, got "
                f"{self.rank}"
            )
        middle, ones = blocks * self.rank * blocks, (1,) * len(shape.size)
        spans = tuple(range(len(shape.size)))
        shuffle = blocks * self.rank if blocks > 1 else 1  # one block has nothing to shuffle
        first = Step(shape.in_channels, middle, shape.size, blocks, spans, shuffle)
        chain = (first, Step(middle, shape.out_channels, ones, blocks))
        object.__setattr__(self, "chain", chain if shape.groups == 1 else None)

    @property
    def cores(self) -> dict[str, tuple[int, ...]]:
        """``L`` and ``R``."""
        out, inputs, *size = self.shape.weight_shape
        width = self.blocks * self.rank
        return {"L": (out, width), "R": (width * self.blocks, inputs // self.blocks, *size)}

    def decompose(
        self,
        weights: Tensor,  # (..., out, in/groups, *size)
        *,
        exact: bool = False,
    ) -> Cores:
        """Return the best approximation: an SVD of each block (the spectral initialization)."""
        b, r = self.blocks, self.rank
        lead = weights.shape[: weights.dim() - len(self.shape.weight_shape)]
        n = len(lead)
        matrix = weights.reshape(*lead, b, self.shape.out_channels // b, b, -1)
        U, V = spectral_factors(matrix.transpose(n + 1, n + 2), r, method_of(exact))  # (..., b, b, long, r)
        L = U.transpose(n + 1, n + 2).reshape(*lead, *self.cores["L"])
        R = V.permute(*range(n), n + 1, n + 3, n, n + 2).reshape(*lead, *self.cores["R"])
        return L, R

    def compose(self, cores: Sequence[Tensor]) -> Tensor:  # (..., out, in/groups, *size)
        """Multiply the factors of every block."""
        U, V = self.by_block(cores)
        blocks = compose(U, V).transpose(-3, -2)  # (..., row block, out/blocks, column block, in/blocks·taps)
        return blocks.reshape(*blocks.shape[:-4], *self.shape.weight_shape)

    def norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Return the sum over blocks of their products' squared norms, from Gram matrices."""
        return frobenius_norm_squared(*self.by_block(cores)).sum(dim=(-2, -1))

    def gradients(self, cores: Sequence[Tensor]) -> Cores:
        """Return the gradients of half the squared norm, block by block."""
        L, R = cores
        dU, dV, _ = frobenius_gradients(*self.by_block(cores))
        n = dU.dim() - 4
        dL = dU.transpose(n + 1, n + 2).reshape(L.shape)
        return dL, dV.permute(*range(n), n + 1, n + 3, n, n + 2).reshape(R.shape)

    def by_block(self, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return ``U`` and ``V`` (..., row block, column block, long, rank) of the blocks' products."""
        L, R = cores
        b, r = self.blocks, self.rank
        n = L.dim() - 2
        lead = L.shape[:n]
        U = L.reshape(*lead, b, -1, b, r).transpose(n + 1, n + 2)
        V = R.reshape(*lead, b, r, b, -1).permute(*range(n), n + 2, n, n + 3, n + 1)
        return U, V

    def chain_weights(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return ``R``, then ``L`` as a pointwise kernel."""
        L, R = cores
        return [R, L.reshape(*L.shape, *(1,) * len(self.shape.size))]

    @property
    def compose_macs(self) -> int:
        """Multiply-accumulates of the blocks' products."""
        return self.shape.numel * self.rank

    def ways(self, stride: tuple[int, ...], device: Device, compiled: bool) -> dict[Way, float]:
        """Return the costs of two block-diagonal layers, with the traffic between them, and of the composed weight."""
        composed = self.shape.numel + self.compose_macs / POSITIONS
        if self.chain is None:
            return {"composed": composed}
        moved = self.shape.in_channels + self.shape.out_channels + 2 * self.chain[0].outputs
        return {"chain": self.numel + (TRAFFIC[device].convolution if stride else 1) * moved, "composed": composed}

    def raised(self) -> list[MonarchFormat]:
        """Return the next rank up, if a block has room for it."""
        return [replace(self, rank=self.rank + 1)] if self.rank < full_rank(self.shape, self.blocks) else []

    def describe(self) -> str:
        """Return the blocks and the rank of each."""
        return f"format=monarch, blocks={self.blocks}, rank={self.rank}"


@dataclass(frozen=True, repr=False)
class Monarch(Scheme):
    """A weight cut into ``blocks`` × ``blocks``, each of a low rank (Dao et al., 2022).

    ``blocks`` must divide outputs and inputs. By default it is the largest with rank steps of at most 3 % of the layer.
    At a rank scale, the rank of a block is ``round(scale · full rank of a block)``, at least 1.

    Raises:
        ValueError: ``blocks`` is not a whole number of at least 1.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> fz.factorize(model, fz.Monarch(blocks=4), rank=2, keep_first_and_last=False)[0]
        FactorizedLinear(64, 64, bias=True, execution=chain, format=monarch, blocks=4, rank=2, params=1,024 of 4,096)
    """

    blocks: int | None = None

    name: ClassVar[str] = "monarch"
    formats: ClassVar[tuple[type[Format], ...]] = (MonarchFormat,)

    def __post_init__(self) -> None:
        if self.blocks is not None:
            check_whole("blocks", self.blocks)

    def refuse(self, module: nn.Module, shape: KernelShape) -> str | None:
        """Return why a layer is left alone: its channels do not divide into blocks."""
        if self.blocks is not None and (shape.out_channels % self.blocks or shape.weight_shape[1] % self.blocks):
            return f"its outputs and inputs do not divide into {self.blocks} blocks"
        return None

    def at_scale(self, shape: KernelShape, scale: float) -> MonarchFormat:
        """Return the format at a rank scale, at most full."""
        blocks = self._blocks(shape)
        full = full_rank(shape, blocks)
        return MonarchFormat(shape, blocks, min(scaled_rank(full, scale), full))

    def at_rank(self, shape: KernelShape, rank: Rank) -> MonarchFormat:
        """Return the format at a rank per block; raise above full rank."""
        if not isinstance(rank, int):
            raise ValueError(f"rank must be one whole number (the rank of every block), got {rank}")
        return MonarchFormat(shape, self._blocks(shape), rank)

    def reference(self, shape: KernelShape) -> int:
        """Return the full rank of a block."""
        return full_rank(shape, self._blocks(shape))

    def _blocks(self, shape: KernelShape) -> int:
        if self.blocks is not None:
            return self.blocks
        out, inputs, *size = shape.weight_shape
        common = gcd(out, inputs)
        step = (out + inputs * prod(size)) / shape.numel  # what a rank costs with one block
        return max(b for b in range(1, common + 1) if common % b == 0 and (b == 1 or b * step <= FINEST))


def full_rank(shape: KernelShape, blocks: int) -> int:
    """Return the rank at which a block can be any matrix."""
    out, inputs, *size = shape.weight_shape
    return min(out // blocks, inputs // blocks * prod(size))
