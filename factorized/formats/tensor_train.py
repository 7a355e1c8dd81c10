"""Tensor trains: TT-SVD, expansion, squared norm and its gradients (Oseledets, 2011).

A tensor (d₁, …, d_n) is held in cores (r_{k-1}, d_k, r_k) with r_0 = r_n = 1; an entry is a product of matrices, one
slice of each core. Every function takes leading batch dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from factorized.formats.folding import TensorScheme
from factorized.formats.format import Cores, Format, Step
from factorized.formats.kernel import KernelShape
from factorized.formats.light_expansion import Indices
from factorized.formats.separable import Separable
from factorized.formats.svd import Method, truncated_svd
from factorized.formats.tensor_format import TensorFormat, balanced


def full_train_ranks(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks, between each two dimensions, at which a train can hold any tensor of these extents."""
    return tuple([min(prod(dims[:k]), prod(dims[k:])) for k in range(1, len(dims))])


def reachable_train_ranks(dims: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the highest ranks up to the given ones that a train can have: r_k ≤ r_{k-1} d_k and r_k ≤ d_{k+1} r_{k+1}.

    Above them a core has dependent rows or columns, whatever its entries.
    """
    around = [1, *ranks, 1]
    for k, d in enumerate(dims[:-1], start=1):
        around[k] = min(around[k], around[k - 1] * d)
    for k in range(len(ranks), 0, -1):
        around[k] = min(around[k], dims[k] * around[k + 1])
    return tuple(around[1:-1])


def raised_train_ranks(dims: Sequence[int], ranks: Sequence[int], place: int) -> tuple[int, ...]:
    """Return the lowest reachable ranks, none below the given ones, with the one at ``place`` one higher."""
    raised = list(ranks)
    raised[place] += 1
    for k in range(place, 0, -1):
        raised[k - 1] = max(raised[k - 1], -(-raised[k] // dims[k]))
    for k in range(place, len(ranks) - 1):
        raised[k + 1] = max(raised[k + 1], -(-raised[k] // dims[k + 1]))
    return tuple(raised)


def tt_svd(
    tensor: Tensor,  # (..., d₁, …, d_n)
    ranks: Sequence[int],  # n - 1 of them
    method: Method = "auto",
) -> Cores:  # each (..., r_{k-1}, d_k, r_k)
    """Return the cores of a tensor train close to ``tensor``, all but the last with orthonormal columns.

    The ranks must be reachable. The error is at most √(n-1) times that of the best train of these ranks, and zero at
    full rank. Half precision is computed and returned in float32.
    """
    dims = tensor.shape[tensor.dim() - len(ranks) - 1 :]
    batch = tensor.shape[: tensor.dim() - len(dims)]
    cores, before = [], 1
    rest = tensor.reshape(*batch, dims[0], -1)
    for d, rank, following in zip(dims, ranks, dims[1:], strict=False):
        U, S, V = truncated_svd(rest, rank, method)
        cores.append(U.reshape(*batch, before, d, rank))
        rest = (S.unsqueeze(-1) * V.mT).reshape(*batch, rank * following, -1)
        before = rank
    cores.append(rest.reshape(*batch, before, dims[-1], 1))
    return tuple(cores)


def tt_round(
    cores: Sequence[Tensor],  # each (..., r_{k-1}, d_k, r_k)
    ranks: Sequence[int],
) -> Cores:
    """Return the ``tt_svd`` of a train's tensor from its cores alone: QR from the right, SVD from the left."""
    right = [cores[-1]]
    for core in reversed(cores[:-1]):  # all but the first get orthonormal rows
        Q, R = torch.linalg.qr(right[0].flatten(-2).mT)  # (..., d_k·r_k, s), (..., s, r_{k-1})
        right[0] = Q.mT.unflatten(-1, right[0].shape[-2:])
        right.insert(0, _times_right(core, R.mT))
    made, rest = [], right[0]
    for following, rank in zip(right[1:], ranks, strict=True):
        U, S, V = truncated_svd(rest.flatten(-3, -2), rank, "exact")
        made.append(U.unflatten(-2, rest.shape[-3:-1]))
        rest = _times_left(S.unsqueeze(-1) * V.mT, following)
    return (*made, rest)


def tt_expand(
    cores: Sequence[Tensor],  # each (..., r_{k-1}, d_k, r_k)
    split: int,
) -> Tensor:  # (..., d₁, …, d_n)
    """Return the tensor, multiplying the first ``split`` cores, the others, and then the two."""
    left, right = tt_halves(cores, split)
    product = left @ right
    return product.reshape(*product.shape[:-2], *[core.shape[-2] for core in cores])


def tt_halves(
    cores: Sequence[Tensor],  # each (..., r_{k-1}, d_k, r_k)
    split: int,
) -> tuple[Tensor, Tensor]:  # (..., d₁⋯d_split, r), (..., r, d_{split+1}⋯d_n)
    """Return the two matrices whose product is the tensor, unfolded between ``split`` and the extent after it."""
    left = cores[0].flatten(-3, -2)
    for core in cores[1:split]:
        product = left @ core.flatten(-2)  # (..., d₁⋯d_{k-1}, d_k·r_k)
        left = product.unflatten(-1, core.shape[-2:]).flatten(-3, -2)
    right = cores[-1].flatten(-2)
    for core in reversed(cores[split:-1]):
        product = core.flatten(-3, -2) @ right  # (..., r_{k-1}·d_k, d_{k+1}⋯d_n)
        right = product.unflatten(-2, core.shape[-3:-1]).flatten(-2)
    return left, right


def tt_norm_squared(
    cores: Sequence[Tensor],  # each (..., r_{k-1}, d_k, r_k)
) -> Tensor:  # (...)
    """Return the squared norm of the tensor by contracting the cores with themselves, from one end to the other."""
    gram = _right_gram(cores[-1], None)
    for core in reversed(cores[:-1]):
        gram = _right_gram(core, gram)
    return gram[..., 0, 0]


def tt_gradients(
    cores: Sequence[Tensor],  # each (..., r_{k-1}, d_k, r_k)
) -> Cores:  # like cores
    """Return the gradients of half the squared norm: ``L G_k R``, the Gram matrices of the cores before and after."""
    rights: list[Tensor | None] = [None]
    for core in reversed(cores[1:]):
        rights.append(_right_gram(core, rights[-1]))
    rights.reverse()
    left: Tensor | None = None
    gradients = []
    for core, right in zip(cores, rights, strict=True):
        seen = _times_left(left, core)
        gradients.append(seen if right is None else _times_right(seen, right))
        left = seen.flatten(-3, -2).mT @ core.flatten(-3, -2)
    return tuple(gradients)


def _right_gram(core: Tensor, gram: Tensor | None) -> Tensor:  # (..., r_{k-1}, r_{k-1})
    """Return the Gram matrix of a core's rows, each multiplied by all that follows it."""
    seen = core if gram is None else _times_right(core, gram)
    return seen.flatten(-2) @ core.flatten(-2).mT


def _times_right(core: Tensor, gram: Tensor) -> Tensor:
    return (core.flatten(-3, -2) @ gram).unflatten(-2, core.shape[-3:-1])


def _times_left(gram: Tensor | None, core: Tensor) -> Tensor:
    return core if gram is None else (gram @ core.flatten(-2)).unflatten(-1, core.shape[-2:])


def right_to_left(
    tensor: Tensor,  # (..., d₁, …, d_n)
    count: int,  # n
) -> Cores:  # each (..., r_{k-1}, d_k, r_k)
    """Return an exact train of ``tensor``, all but its first core with orthonormal rows."""
    batch = tensor.dim() - count
    flipped = tensor.permute(*range(batch), *reversed(range(batch, tensor.dim())))
    ranks = full_train_ranks(flipped.shape[batch:])
    return tuple(core.transpose(-3, -1) for core in reversed(tt_svd(flipped, ranks, "exact")))


@dataclass(frozen=True)
class TrainFormat(TensorFormat):
    """A weight, folded into ``dims``, as a tensor train with ranks between each two of them."""

    shape: KernelShape
    dims: tuple[int, ...]
    rank: tuple[int, ...]
    split: int = field(init=False, compare=False, repr=False)  # where the two halves of an expansion meet
    chain: tuple[Step, ...] | None = field(init=False, compare=False, repr=False)

    name: ClassVar[str] = "tensor_train"

    def __post_init__(self) -> None:
        self.check()
        if len(self.rank) != len(self.dims) - 1:
            raise ValueError(f"rank must be {len(self.dims) - 1} numbers for dims {self.dims}, got {self.rank}")
        costs = {split: self._expand_macs(split) for split in range(1, len(self.dims))}
        object.__setattr__(self, "split", min(costs, key=costs.__getitem__))
        object.__setattr__(self, "chain", self._chain())

    def _chain(self) -> tuple[Step, ...] | None:
        """Return a k×k layer to the rank between outputs and inputs, then a 1×1; None where dimensions mix the two."""
        boundary, shape = self.boundary, self.shape
        if boundary is None or shape.groups > 1:
            return None
        middle, spans = self.rank[boundary - 1], tuple(range(len(shape.size)))
        first = Step(shape.in_channels, middle, shape.size, spans=spans)
        return first, Step(middle, shape.out_channels, (1,) * len(shape.size))

    @property
    def full_ranks(self) -> tuple[int, ...]:
        """The ranks at which a train can hold any tensor of these extents."""
        return full_train_ranks(self.dims)

    @property
    def reference_ranks(self) -> tuple[int, ...]:
        """The smaller of two neighbouring dimensions."""
        return tuple([min(pair) for pair in zip(self.dims, self.dims[1:], strict=False)])

    def reachable(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the highest ranks up to the given ones that a train can have."""
        return reachable_train_ranks(self.dims, ranks)

    def one_higher(self, place: int) -> tuple[int, ...]:
        """Return the lowest reachable ranks with the one at ``place`` one higher than now."""
        return raised_train_ranks(self.dims, self.rank, place)

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(r_{k-1}, d_k, r_k) for every extent."""
        around = (1, *self.rank, 1)
        return tuple([(around[k], d, around[k + 1]) for k, d in enumerate(self.dims)])

    @property
    def indices(self) -> Indices:
        """A rank, an extent and the next rank for every core."""
        return tuple([(f"r{k}", f"d{k}", f"r{k + 1}") for k in range(len(self.dims))])

    @property
    def compose_macs(self) -> int:
        """Multiply-accumulates of both halves and their product."""
        return self._expand_macs(self.split)

    @property
    def expand_held(self) -> list[int]:
        """Entries of the products of the first cores, and of the last ones."""
        shapes = self.core_shapes
        left = [prod(self.dims[: k + 1]) * shapes[k][2] for k in range(1, self.split)]
        right = [prod(self.dims[k:]) * shapes[k][0] for k in range(self.split, len(shapes) - 1)]
        return left + right

    @property
    def contract_macs(self) -> int:
        """Two products per core: with the Gram matrix of what follows, and with itself."""
        return sum([before * d * after * (before + after) for before, d, after in self.core_shapes])

    @property
    def gradient_macs(self) -> int:
        """As for the norm, from both ends."""
        return 2 * self.contract_macs

    @property
    def held_channels(self) -> int:
        """The rank between outputs and inputs."""
        return self.rank[self.chain_boundary - 1]

    @property
    def prepare_macs(self) -> int:
        """Multiply-accumulates of the two halves."""
        return self._halves_macs(self.chain_boundary)

    def decompose_tensor(
        self,
        tensor: Tensor,  # (..., *dims)
        method: Method = "auto",
    ) -> Cores:
        """Return the cores of the TT-SVD, scaled to one norm."""
        cores = balanced(tt_svd(tensor, self.rank, method), tensor.dim() - len(self.dims))
        return tuple(core.to(tensor.dtype) for core in cores)

    def truncate(self, cores: Sequence[Tensor], target: Format) -> Cores:
        """Return the TT-SVD of the tensor at the target's ranks, without forming the tensor."""
        if not isinstance(target, TrainFormat) or cores[0].dtype in (torch.float16, torch.bfloat16):
            return super().truncate(cores, target)
        return balanced(tt_round(cores, target.rank), cores[0].dim() - 3)

    def expand(self, cores: Sequence[Tensor]) -> Tensor:  # (..., *dims)
        """Multiply the cores in the cheapest order of two halves."""
        return tt_expand(cores, self.split)

    def chain_weights(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return the halves of the train, the one of the inputs first."""
        left, right = tt_halves(cores, self.chain_boundary)
        ones = (1,) * len(self.shape.size)
        return [right.reshape(-1, *self.shape.weight_shape[1:]), left.reshape(*left.shape, *ones)]

    def contracted_norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Contract from one end to the other."""
        return tt_norm_squared(cores)

    def contracted_gradients(self, cores: Sequence[Tensor]) -> Cores:
        """Contract from both ends to every core."""
        return tt_gradients(cores)

    def _halves_macs(self, split: int) -> int:
        shapes = self.core_shapes
        left = [prod(self.dims[: k + 1]) * shapes[k][0] * shapes[k][2] for k in range(1, split)]
        right = [prod(self.dims[k:]) * shapes[k][0] * shapes[k][2] for k in range(split, len(shapes) - 1)]
        return sum(left) + sum(right)

    def _expand_macs(self, split: int) -> int:
        return self._halves_macs(split) + prod(self.dims) * self.rank[split - 1]


@dataclass(frozen=True, repr=False)
class TensorTrain(TensorScheme):
    """A weight, folded into several dimensions, as a tensor train (section 4 of the paper, Oseledets 2011).

    The dimensions are chosen, given as ``dims`` (their product is the weight's size), or ``order`` nearly equal ones.
    At a rank scale, the rank between two dimensions is ``round(scale · the smaller of them)``, at least 1.
    ``separable=True`` is the block of the paper's experiments: a depthwise convolution, then the pointwise matrix
    folded into three dimensions and decomposed; all layers but k×k convolutions stay dense.

    Raises:
        ValueError: ``dims`` and ``order`` are both given, or have wrong values.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> model = fz.factorize(model, fz.TensorTrain(order=3), rank_scale=0.5, keep_first_and_last=False)
        >>> model[0].format.dims, model[0].rank
        ((16, 16, 16), (8, 8))
    """

    name: ClassVar[str] = "tensor_train"
    formats: ClassVar[tuple[type[Format], ...]] = (TrainFormat, Separable)

    def smallest(self, shape: KernelShape, dims: tuple[int, ...]) -> TrainFormat:
        """Return the train of rank 1."""
        return TrainFormat(shape, dims, (1,) * (len(dims) - 1))
