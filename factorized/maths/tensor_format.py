"""What every tensor format has: cores that stand for a tensor, and how to make, expand and measure them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

# Entries kept on the way through an expansion, over those of the tensor, with which training holds twice what the dense
# tensor does: measured.
MOST_KEPT = 2.25
Cores = tuple[Tensor, ...]  # each (..., *one of core_shapes)
Indices = tuple[tuple[str, ...], ...]  # a name per dimension of every core


class TensorFormat(ABC):
    """The extents of a tensor and of the cores it is held in. Abstract: a ``TrainFormat`` or a ``TuckerFormat``.

    Cores may have leading batch dimensions, all the same.
    """

    dims: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    @abstractmethod
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every core."""

    @property
    @abstractmethod
    def indices(self) -> Indices:
        """The name of every dimension of every core: "d0", "d1", … of the tensor's, one of its own where cores meet."""

    @property
    @abstractmethod
    def expand_macs(self) -> int:
        """Multiply-accumulates of ``expand``."""

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

    @abstractmethod
    def decompose(
        self,
        tensor: Tensor,  # (..., *dims)
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

    @property
    def core_numel(self) -> int:
        """Entries of all cores."""
        return sum([prod(shape) for shape in self.core_shapes])

    @property
    def numel(self) -> int:
        """Entries of the tensor."""
        return prod(self.dims)

    @property
    def keeps_little(self) -> bool:
        """Whether training with ``expand`` holds at most twice what training with the tensor itself would."""
        held = self.expand_held
        return self.core_numel + sum(held) + max(held, default=0) <= MOST_KEPT * self.numel

    def norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Return the squared norm of the tensor, which is formed only where that is cheaper. Differentiable."""
        if self.contract_macs <= self.expand_macs + self.numel:
            return self.contracted_norm_squared(cores)
        return self.expand(cores).flatten(-len(self.dims)).square().sum(-1)

    def gradients(self, cores: Sequence[Tensor]) -> Cores:  # like cores
        """Return the gradients of half the squared norm: by contraction or, where cheaper, from the tensor itself.

        Of the tensor ``W`` half the squared norm has the gradient ``W``, which goes back through the expansion.
        """
        if self.gradient_macs <= 3 * self.expand_macs:
            return self.contracted_gradients(cores)
        return pull_back(self.expand, cores)


def pull_back(expand: Callable[[Sequence[Tensor]], Tensor], cores: Sequence[Tensor], at: Tensor | None = None) -> Cores:
    """Return the gradients of ⟨``at``, expand(cores)⟩; ``at`` is the expansion itself unless given."""
    leaves = [core.detach().requires_grad_() for core in cores]
    with torch.enable_grad():
        tensor = expand(leaves)
    return torch.autograd.grad(tensor, leaves, tensor.detach() if at is None else at)


def balanced(
    cores: Sequence[Tensor],  # each (..., *core)
    batch: int,  # leading dimensions that are a batch
) -> Cores:
    """Scale the cores to one common norm, by factors that multiply to 1; cores of a zero tensor stay as they are."""
    norms = torch.stack([core.flatten(batch).norm(dim=-1) for core in cores])  # (cores, ...)
    mean = norms.log().mean(dim=0).exp()
    scales = torch.where((norms > 0).all(dim=0), mean / norms, torch.ones_like(norms))
    return tuple(
        core * scale.reshape(*scale.shape, *[1] * (core.dim() - batch))
        for core, scale in zip(cores, scales, strict=True)
    )
