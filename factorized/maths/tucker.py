"""Tucker tensors: HOSVD with HOOI refinement, expansion, squared norm and its gradients.

A tensor (d₁, …, d_n) is a core (R₁, …, R_n) multiplied in every mode by a factor (d_k, R_k) (De Lathauwer et al.,
2000); modes may be kept whole and then have no factor. Every function takes leading batch dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import Tensor

from factorized.maths.spectral import Method, truncated_svd
from factorized.maths.tensor_format import Cores, Indices, TensorFormat, balanced, pull_back
from factorized.maths.tensor_train import TrainFormat, full_train_ranks, right_to_left

CoreKind = Literal["whole", "train"]
Factors = Sequence[Tensor | None]  # each (..., d_k, R_k); None for a mode that is kept whole


def reachable_tucker_ranks(ranks: Sequence[int], kept: int) -> tuple[int, ...]:
    """Return the highest ranks up to the given ones of which none is above the product of all others.

    ``kept`` is the product of the extents that are kept whole. Above that, a factor has columns that add nothing.
    """
    reachable = list(ranks)
    for mode in range(len(reachable)):
        others = prod(reachable[:mode]) * prod(reachable[mode + 1 :]) * kept
        reachable[mode] = min(reachable[mode], others)
    return tuple(reachable)


def raised_tucker_ranks(ranks: Sequence[int], full: Sequence[int], kept: int, place: int) -> tuple[int, ...]:
    """Return low reachable ranks from the given ones up of which the one at ``place``, not yet full, is one higher."""
    raised = list(ranks)
    raised[place] += 1
    while reachable_tucker_ranks(raised, kept)[place] < raised[place]:
        others = [k for k in range(len(raised)) if k != place and raised[k] < full[k]]
        raised[min(others, key=raised.__getitem__)] += 1
    return tuple(raised)


def hosvd(
    tensor: Tensor,  # (..., d₁, …, d_n)
    ranks: Sequence[int | None],  # n of them; None keeps a mode whole
    refinements: int = 0,
    method: Method = "auto",
) -> tuple[Tensor, list[Tensor | None]]:  # (..., R₁, …, R_n), factors (..., d_k, R_k)
    """Return the higher-order SVD: per mode the leading left singular vectors of the unfolding, and the core.

    The error is at most √n times that of the best Tucker tensor of these ranks, and none at full rank;
    ``refinements`` rounds of higher-order orthogonal iteration (HOOI) bring it down to a stationary point. Half types
    are computed, and returned, in float32.
    """
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    cut = [mode for mode, rank in enumerate(ranks) if rank is not None]
    factors: list[Tensor | None] = [None] * len(ranks)
    for mode in cut:
        factors[mode] = _leading_vectors(tensor, mode, ranks, method)
    for _ in range(refinements):
        for mode in cut:
            others = [None if k == mode else factor for k, factor in enumerate(factors)]
            factors[mode] = _leading_vectors(_project(tensor, others), mode, ranks, method)
    return _project(tensor, factors), factors


def tucker_expand(
    core: Tensor,  # (..., R₁, …, R_n)
    factors: Factors,
    order: Sequence[int] | None = None,
) -> Tensor:  # (..., d₁, …, d_n)
    """Return the tensor, multiplying the core by the factors in ``order``, each by one matrix product.

    A mode that is multiplied goes to the end, so that the next one is often in front, where it needs no copy.
    """
    count = len(factors)
    batch = core.dim() - count
    modes = list(range(count))  # in the order in which the dimensions stand
    for mode in order if order is not None else range(count):
        factor = factors[mode]
        if factor is None:
            continue
        place = modes.index(mode)
        modes.append(modes.pop(place))
        others = [core.shape[batch + k] for k in range(count) if k != place]
        if place == 0:
            matrix = core.flatten(batch + 1).mT if count > 1 else core.unsqueeze(batch)
        else:
            matrix = core.movedim(batch + place, -1).flatten(batch, -2)
        product = matrix @ factor.mT  # (..., all others, d)
        core = product.reshape(*core.shape[:batch], *others, factor.shape[-2])
    return core.permute(*range(batch), *[batch + modes.index(mode) for mode in range(count)])


def tucker_norm_squared(
    core: Tensor,  # (..., R₁, …, R_n)
    factors: Factors,
) -> Tensor:  # (...)
    """Return the squared norm of the tensor from the core and the R×R Gram matrices of the factors."""
    seen = tucker_expand(core, _grams(factors))
    return (core * seen).flatten(core.dim() - len(factors)).sum(-1)


def tucker_gradients(
    core: Tensor,  # (..., R₁, …, R_n)
    factors: Factors,
) -> tuple[Tensor, list[Tensor | None]]:  # like core, like factors
    """Return the gradients of half the squared norm with respect to the core and the factors."""
    grams = _grams(factors)
    gradients: list[Tensor | None] = []
    for mode, factor in enumerate(factors):
        if factor is None:
            gradients.append(None)
            continue
        seen = tucker_expand(core, [None if k == mode else gram for k, gram in enumerate(grams)])
        gradients.append(factor @ (unfold(seen, mode, len(factors)) @ unfold(core, mode, len(factors)).mT))
    return tucker_expand(core, grams), gradients


def _grams(factors: Factors) -> list[Tensor | None]:
    return [None if factor is None else factor.mT @ factor for factor in factors]


def _project(tensor: Tensor, factors: Factors) -> Tensor:
    return tucker_expand(tensor, [None if factor is None else factor.mT for factor in factors])


def _leading_vectors(tensor: Tensor, mode: int, ranks: Sequence[int | None], method: Method) -> Tensor:
    rank = ranks[mode]
    assert rank is not None
    unfolded = unfold(tensor, mode, len(ranks))
    if rank > unfolded.shape[-1]:  # fewer columns than vectors asked for: any orthonormal completion will do
        unfolded = unfolded @ unfolded.mT
    return truncated_svd(unfolded, rank, method)[0]


def unfold(
    tensor: Tensor,  # (..., e₁, …, e_modes)
    mode: int,
    modes: int,
) -> Tensor:  # (..., e_mode, all others)
    """Return the tensor as a matrix whose rows are one of its modes."""
    batch = tensor.dim() - modes
    return tensor.movedim(batch + mode, batch).flatten(batch + 1)


@dataclass(frozen=True)
class TuckerFormat(TensorFormat):
    """A Tucker tensor whose last ``kept`` modes are kept whole.

    ``core="train"`` holds the core as a tensor train of the ranks that the tensor itself would need, as the paper's
    experiments did: the same function class, more parameters (docs/tensor.md).
    """

    dims: tuple[int, ...]
    ranks: tuple[int, ...]  # of the modes that are not kept
    kept: int = 0
    core: CoreKind = "whole"
    refinements: int = 0  # rounds of HOOI in ``decompose``
    order: tuple[int, ...] = field(init=False, compare=False, repr=False)  # of the mode products of an expansion
    train: TrainFormat | None = field(init=False, compare=False, repr=False)  # of the core

    def __post_init__(self) -> None:
        # Exchanging two neighbours in the order shows that this one is the cheapest.
        growth = [1 / rank - 1 / d for d, rank in zip(self.dims, self.ranks, strict=False)]
        object.__setattr__(self, "order", tuple(sorted(range(len(growth)), key=growth.__getitem__)))
        extents = self.core_extents
        train = TrainFormat(extents, full_train_ranks((self.dims[0], *extents[1:]))) if self.core == "train" else None
        object.__setattr__(self, "train", train)

    @property
    def core_extents(self) -> tuple[int, ...]:
        """The extents of the core."""
        return (*self.ranks, *self.dims[len(self.ranks) :])

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The core, or the cores of its train, then a (d_k, R_k) per mode that is not kept."""
        core = (self.core_extents,) if self.train is None else self.train.core_shapes
        return (*core, *zip(self.dims, self.ranks, strict=False))

    @property
    def indices(self) -> Indices:
        """As of the shapes: a mode that is not kept has an index of the core beside its own."""
        modes = {f"d{k}": f"R{k}" for k in range(len(self.ranks))}
        core = (tuple([f"d{k}" for k in range(len(self.dims))]),) if self.train is None else self.train.indices
        cores = tuple([tuple([modes.get(name, name) for name in names]) for names in core])
        return (*cores, *modes.items())

    @property
    def expand_macs(self) -> int:
        """Of the core's train, if any, and one mode product after the other."""
        extents = list(self.core_extents)
        macs = 0 if self.train is None else self.train.expand_macs
        for mode in self.order:
            extents[mode] = self.dims[mode]
            macs += prod(extents) * self.ranks[mode]
        return macs

    @property
    def expand_held(self) -> list[int]:
        """The core of a train, and all mode products but the last."""
        extents = list(self.core_extents)
        held = [] if self.train is None else [*self.train.expand_held, prod(extents)]
        for mode in self.order[:-1]:
            extents[mode] = self.dims[mode]
            held.append(prod(extents))
        return held

    @property
    def contract_macs(self) -> int:
        """Of the Gram matrices, and of the core with each of them."""
        grams = sum([d * rank * rank for d, rank in zip(self.dims, self.ranks, strict=False)])
        core = prod(self.core_extents) * (sum(self.ranks) + 1) + (0 if self.train is None else self.train.expand_macs)
        return grams + core

    @property
    def gradient_macs(self) -> int:
        """Of the Gram matrices, made and applied, and of the core with all but each of them, and with all."""
        grams = sum([d * rank * rank for d, rank in zip(self.dims, self.ranks, strict=False)])
        train = 0 if self.train is None else 4 * self.train.expand_macs  # forward, and again with a backward pass
        return 2 * grams + (len(self.ranks) + 1) * prod(self.core_extents) * sum(self.ranks) + train

    def decompose(
        self,
        tensor: Tensor,  # (..., *dims)
    ) -> Cores:
        """Return the HOSVD, refined as asked, all cores scaled to one norm."""
        batch = tensor.dim() - len(self.dims)
        core, factors = hosvd(tensor, (*self.ranks, *[None] * self.kept), self.refinements)
        present = [factor for factor in factors if factor is not None]
        cores: Cores = (core,)
        if self.train is not None:
            rest = _project(tensor.to(core.dtype), [None, *factors[1:]])  # (..., d₁, R₂, …)
            first, *others = right_to_left(rest, len(self.dims))
            cores = ((present[0].mT @ first.squeeze(-3)).unsqueeze(-3), *others)
        return tuple(part.to(tensor.dtype) for part in balanced((*cores, *present), batch))

    def expand(self, cores: Sequence[Tensor]) -> Tensor:  # (..., *dims)
        """Multiply the core by the factors in the cheapest order."""
        core, factors = self.parts(cores)
        return tucker_expand(core, factors, self.order)

    def parts(self, cores: Sequence[Tensor]) -> tuple[Tensor, Factors]:
        """Return the core as one tensor, and a factor or None per mode."""
        count = len(cores) - len(self.ranks)
        factors: Factors = [*cores[count:], *[None] * self.kept]
        return (cores[0] if self.train is None else self.train.expand(cores[:count])), factors

    def contracted_norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Multiply the core by the factors' Gram matrices."""
        return tucker_norm_squared(*self.parts(cores))

    def contracted_gradients(self, cores: Sequence[Tensor]) -> Cores:
        """Multiply by Gram matrices; through the core's train, if any, the core's gradient goes back."""
        core, factors = self.parts(cores)
        of_core, of_factors = tucker_gradients(core, factors)
        first: Cores = (of_core,)
        if self.train is not None:
            first = pull_back(self.train.expand, cores[: len(cores) - len(self.ranks)], of_core)
        return (*first, *[gradient for gradient in of_factors if gradient is not None])
