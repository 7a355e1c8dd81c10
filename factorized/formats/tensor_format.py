"""Base class of tensor formats: a weight folded into several dimensions and held in cores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from factorized._checks import is_whole
from factorized._torch import is_jit_tracing
from factorized.formats.cost import POSITIONS, TRAFFIC, Device
from factorized.formats.format import Call, Cores, Format, Rank, Way, pull_back
from factorized.formats.light_expansion import Indices, light_expansion
from factorized.formats.svd import Method, method_of

# Entries kept by an expansion, relative to the tensor's, at which training needs twice the memory of the dense tensor
# (measured).
MOST_KEPT = 2.25
# Channels between input and output, relative to theirs, at which a layer needs twice a dense one's memory (measured).
MOST_HELD = 1.8


class TensorFormat(Format):
    """A weight, reshaped to a tensor of other dimensions, in a format with several ranks. Abstract."""

    dims: tuple[int, ...]
    rank: tuple[int, ...]

    @property
    @abstractmethod
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every core."""

    @property
    @abstractmethod
    def indices(self) -> Indices:
        """Names of the dimensions of every core: "d0", "d1", … for the tensor's, a common name where two cores meet."""

    @property
    @abstractmethod
    def full_ranks(self) -> tuple[int, ...]:
        """The ranks at which the format can hold any weight."""

    @property
    @abstractmethod
    def reference_ranks(self) -> tuple[int, ...]:
        """What a rank scale multiplies."""

    @property
    @abstractmethod
    def expand_held(self) -> list[int]:
        """Entries of every tensor between the cores and the result of ``expand``."""

    @property
    @abstractmethod
    def contract_macs(self) -> int:
        """Multiply-accumulates of the squared norm by contraction."""

    @property
    @abstractmethod
    def gradient_macs(self) -> int:
        """Multiply-accumulates of the gradients by contraction."""

    @property
    @abstractmethod
    def held_channels(self) -> int:
        """Channels per position of all tensors between input and output, where the format runs as a chain."""

    @abstractmethod
    def reachable(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the highest useful ranks, none above the given ones."""

    @abstractmethod
    def one_higher(self, place: int) -> tuple[int, ...]:
        """Return the lowest reachable ranks with the one at ``place`` one higher than now."""

    @abstractmethod
    def decompose_tensor(
        self,
        tensor: Tensor,  # (..., *dims)
        method: Method = "auto",
    ) -> Cores:
        """Return cores whose expansion approximates ``tensor``, exactly at full rank; all of one norm."""

    @abstractmethod
    def expand(self, cores: Sequence[Tensor]) -> Tensor:  # (..., *dims)
        """Return the tensor that the cores stand for. Differentiable; nothing in between is larger than the result."""

    @abstractmethod
    def contracted_norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Return the squared norm of the tensor from the cores alone."""

    @abstractmethod
    def contracted_gradients(self, cores: Sequence[Tensor]) -> Cores:
        """Return the gradients of half the squared norm from the cores alone."""

    def check(self) -> None:
        """Raise unless the dimensions hold the weight and the ranks are possible."""
        if not (isinstance(self.dims, tuple) and len(self.dims) >= 2 and all(map(is_whole, self.dims))):
            raise ValueError(f"dims must be at least two whole numbers of at least 1, got {self.dims!r}")
        if prod(self.dims) != self.shape.numel:
            raise ValueError(
                f"dims {self.dims} multiply to {prod(self.dims):,}, but the weight {self.shape} has "
                f"{self.shape.numel:,} entries; give dims whose product is {self.shape.numel:,}"
            )
        if not (isinstance(self.rank, tuple) and all(map(is_whole, self.rank))):
            raise ValueError(f"rank must be whole numbers of at least 1, got {self.rank!r}")

    @property
    def cores(self) -> dict[str, tuple[int, ...]]:
        """The cores, numbered."""
        return {f"cores.{n}": extents for n, extents in enumerate(self.core_shapes)}

    @property
    def boundary(self) -> int | None:
        """How many of the dimensions make up the output channels; None where they mix with the input's."""
        ends = [k for k in range(1, len(self.dims)) if prod(self.dims[:k]) == self.shape.out_channels]
        return ends[0] if ends else None

    @property
    def chain_boundary(self) -> int:
        """The boundary of a format that runs as a chain."""
        if self.boundary is None:
            raise NotImplementedError(f"{self.name} with dims {self.dims} has no chain: they mix outputs and inputs")
        return self.boundary

    @property
    def keeps_little(self) -> bool:
        """Whether training with ``expand`` needs at most twice the memory of training with the tensor itself."""
        held = self.expand_held
        return self.numel + sum(held) + max(held, default=0) <= MOST_KEPT * self.shape.numel

    def decompose(
        self,
        weights: Tensor,  # (..., out, in/groups, *size)
        *,
        exact: bool = False,
    ) -> Cores:
        """Fold the weights and decompose them."""
        batch = weights.shape[: weights.dim() - len(self.shape.weight_shape)]
        return self.decompose_tensor(weights.reshape(*batch, *self.dims), method_of(exact))

    def compose(self, cores: Sequence[Tensor]) -> Tensor:  # (..., out, in/groups, *size)
        """Expand the tensor; near full rank, only its cores are kept for the backward pass.

        A compiler would unroll the slices of that pass into ten times as many products; it decides itself what is kept.
        A trace by ``torch.jit`` could not be saved with a Python function in it.
        """
        batch = cores[0].shape[: cores[0].dim() - len(self.core_shapes[0])]
        if batch or torch.compiler.is_compiling() or is_jit_tracing() or self.keeps_little:
            tensor = self.expand(cores)
        else:
            tensor = light_expansion(self.expand, self.indices, cores)
        return tensor.reshape(*batch, *self.shape.weight_shape)

    def norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Return the squared norm of the tensor, which is formed only where that is cheaper. Differentiable."""
        if self.contract_macs <= self.compose_macs + self.shape.numel:
            return self.contracted_norm_squared(cores)
        return self.expand(cores).flatten(-len(self.dims)).square().sum(-1)

    def gradients(self, cores: Sequence[Tensor]) -> Cores:  # like cores
        """Return the gradients of half the squared norm: by contraction or, where cheaper, from the tensor itself."""
        if self.gradient_macs <= 3 * self.compose_macs:
            return self.contracted_gradients(cores)
        return pull_back(self.expand, cores)

    def clipped(self, rank: Rank) -> Self:
        """Return the format at one rank for every place, or a rank per place, clipped to what is possible."""
        full = self.full_ranks
        ranks = tuple(rank) if isinstance(rank, (tuple, list)) else (rank,) * len(full)
        if len(ranks) != len(full) or not all(map(is_whole, ranks)):
            raise ValueError(
                f"rank must be a whole number of at least 1, or {len(full)} of them, up to {full} for dims {self.dims} "
                f"({self.name}), got {rank!r}"
            )
        return self.with_rank(self.reachable([min(pair) for pair in zip(ranks, full, strict=True)]))

    def with_rank(self, ranks: tuple[int, ...]) -> Self:
        """Return the format at other ranks."""
        return replace(self, rank=ranks)

    def raised(self) -> list[Self]:
        """Return the next ranks up: each that is not full raised by one, along with the others that this requires."""
        full = self.full_ranks
        return [self.with_rank(self.one_higher(k)) for k in range(len(full)) if self.rank[k] < full[k]]

    def lowered(self) -> list[Self]:
        """Return the next ranks down: each above 1 lowered by one, along with the others that depend on it."""
        places = [place for place in range(len(self.rank)) if self.rank[place] > 1]
        lower = [[rank - (k == place) for k, rank in enumerate(self.rank)] for place in places]
        return [self.with_rank(self.reachable(ranks)) for ranks in lower]

    def ways(self, stride: tuple[int, ...], device: Device, compiled: bool) -> dict[Way, float]:
        """Return the costs of the composed weight and, where there is one, of the chain.

        No layer may need more than twice the memory of the dense one, which holds its weight, the weight's gradient,
        input and output. A way that needs more costs infinity, unless it is the only one.
        """
        composed = self.shape.numel + self.compose_macs / POSITIONS
        if self.chain is None:
            return {"composed": composed}
        extents = tuple(stride)
        call = Call(1, extents, (1,) * len(extents))  # one output position, and the inputs that it skips
        channels = self.shape.in_channels + self.shape.out_channels
        moving = TRAFFIC[device].convolution * (len(self.chain) - 1) if stride else 0
        chain = self.chain_macs(call) + self.prepare_macs / POSITIONS + moving * channels
        fits = self.held_channels <= MOST_HELD * channels
        return {
            "composed": composed if self.keeps_little else float("inf"),
            "chain": chain if fits else float("inf"),
        }

    def describe(self) -> str:
        """Return the format, its dimensions and ranks."""
        return f"format={self.name}, dims={self.dims}, rank={self.rank}"


def balanced(
    cores: Sequence[Tensor],  # each (..., *core)
    batch: int,  # leading dimensions that are a batch
) -> Cores:
    """Scale the cores to one common norm, by factors that multiply to 1; cores of a zero tensor stay as they are."""
    norms = torch.stack([_norm(core.flatten(batch)) for core in cores])  # (cores, ...)
    mean = norms.log().mean(dim=0).exp()
    scales = torch.where((norms > 0).all(dim=0), mean / norms, torch.ones_like(norms))
    return tuple(
        core * scale.reshape(*scale.shape, *[1] * (core.dim() - batch))
        for core, scale in zip(cores, scales, strict=True)
    )


def _norm(
    entries: Tensor,  # (..., entries)
) -> Tensor:  # (...)
    """Return norms whose squares may be out of range."""
    largest = entries.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(entries.dtype).tiny)
    return (entries / largest).norm(dim=-1) * largest.squeeze(-1)
