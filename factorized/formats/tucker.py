"""A weight as a Tucker tensor: the format and the scheme that chooses it. The mathematics is in ``hosvd.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from factorized._checks import check_choice, check_whole
from factorized.formats import hosvd
from factorized.formats.convolution import Geometry
from factorized.formats.folding import TensorScheme
from factorized.formats.format import Adjust, Call, Cores, Format, Step, Way, pull_back
from factorized.formats.kernel import KernelShape
from factorized.formats.light_expansion import Indices
from factorized.formats.separable import Separable
from factorized.formats.svd import Method
from factorized.formats.tensor_format import TensorFormat, balanced
from factorized.formats.tensor_train import TrainFormat, full_train_ranks, right_to_left

CoreKind = Literal["whole", "train"]
# Multiplications of an expansion without copies, relative to the fewest, up to which it is taken to be faster. Chosen
# by few timings on a CPU: the 320×320 weight of WideResNet-28-10 took 214 µs without copies and 253 with them.
COPY = 1.25


@dataclass(frozen=True)
class TuckerFormat(TensorFormat):
    """A weight, folded into ``dims``, as a Tucker tensor; a kernel's dimensions, if they come last, are kept whole.

    ``core="train"`` holds the core as a tensor train of the ranks that the tensor itself would need, as the paper's
    experiments did: the same function class, more parameters (docs/tensor.md).
    """

    shape: KernelShape
    dims: tuple[int, ...]
    rank: tuple[int, ...]  # of the modes that are not kept
    core: CoreKind = "whole"
    refinements: int = 0  # rounds of HOOI in ``decompose``
    order: tuple[int, ...] = field(init=False, compare=False, repr=False)  # of the mode products of an expansion
    train: TrainFormat | None = field(init=False, compare=False, repr=False)  # of the core
    chain: tuple[Step, ...] | None = field(init=False, compare=False, repr=False)

    name: ClassVar[str] = "tucker"

    def __post_init__(self) -> None:
        self.check()
        if len(self.rank) != len(self.dims) - self.kept:
            raise ValueError(f"rank must be {len(self.dims) - self.kept} numbers for dims {self.dims}, got {self.rank}")
        check_choice("core", self.core, ("whole", "train"))
        check_whole("refinements", self.refinements, least=0)
        object.__setattr__(self, "order", self._order())
        object.__setattr__(self, "train", self._train())
        object.__setattr__(self, "chain", self._chain())

    def _order(self) -> tuple[int, ...]:
        """Return the order of the mode products: as the modes stand, which needs no copies, unless that costs more."""
        growth = [1 / rank - 1 / d for d, rank in zip(self.dims, self.rank, strict=False)]
        standing = tuple(range(len(growth)))
        # Exchanging two neighbours in the order shows that this one is the cheapest.
        cheapest = tuple(sorted(standing, key=growth.__getitem__))
        return standing if self._mode_macs(standing) <= COPY * self._mode_macs(cheapest) else cheapest

    def _train(self) -> TrainFormat | None:
        if self.core != "train":
            return None
        extents = self.core_extents
        ranks = full_train_ranks((self.dims[0], *extents[1:]))
        return TrainFormat(KernelShape(extents[0], prod(extents[1:])), extents, ranks)

    def _chain(self) -> tuple[Step, ...] | None:
        """Return three layers (1×1, k×k and 1×1 of a convolution); None where the modes are not plain layers."""
        boundary, shape = self.boundary, self.shape
        if boundary is None or shape.groups > 1:
            return None
        taps, ones = prod(shape.size), (1,) * len(shape.size)
        channels_apart = boundary == 1 and len(self.rank) == 2
        if shape.size and not (channels_apart and (self.kept or taps == 1)):
            return None
        outputs, inputs = prod(self.rank[:boundary]), prod(self.rank[boundary:])
        all_dims = tuple(range(len(shape.size)))
        first, second = (all_dims, ()) if taps == 1 else ((), all_dims)  # a pointwise chain applies its stride first
        return (
            Step(shape.in_channels, inputs, ones, spans=first),
            Step(inputs, outputs, shape.size, spans=second),
            Step(outputs, shape.out_channels, ones),
        )

    @property
    def kept(self) -> int:
        """How many trailing dimensions are the kernel's own, which are kept whole."""
        return kept_modes(self.shape, self.dims)

    @property
    def full_ranks(self) -> tuple[int, ...]:
        """The extents, as far as the others allow."""
        return self.reachable(self.dims[: len(self.dims) - self.kept])

    @property
    def reference_ranks(self) -> tuple[int, ...]:
        """Full rank."""
        return self.full_ranks

    def reachable(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the highest ranks, up to the given ones, none of which exceeds the product of the others."""
        return hosvd.reachable_tucker_ranks(ranks, prod(self.dims[len(self.rank) :]))

    def one_higher(self, place: int) -> tuple[int, ...]:
        """Return low reachable ranks with the one at ``place`` one higher than now."""
        return hosvd.raised_tucker_ranks(self.rank, self.full_ranks, prod(self.dims[len(self.rank) :]), place)

    @property
    def core_extents(self) -> tuple[int, ...]:
        """The extents of the core."""
        return (*self.rank, *self.dims[len(self.rank) :])

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The core, or the cores of its train, then a (d_k, R_k) per mode that is not kept."""
        core = (self.core_extents,) if self.train is None else self.train.core_shapes
        return (*core, *zip(self.dims, self.rank, strict=False))

    @property
    def indices(self) -> Indices:
        """Names as in ``core_shapes``: a factor has its mode's dimension and the core's dimension for that mode."""
        modes = {f"d{k}": f"R{k}" for k in range(len(self.rank))}
        core = (tuple([f"d{k}" for k in range(len(self.dims))]),) if self.train is None else self.train.indices
        cores = tuple([tuple([modes.get(name, name) for name in names]) for names in core])
        return (*cores, *modes.items())

    @property
    def compose_macs(self) -> int:
        """Multiply-accumulates of the core's train, if any, and of the mode products in order."""
        return self.prepare_macs + self._mode_macs(self.order)

    def _mode_macs(self, order: Sequence[int]) -> int:
        extents, macs = list(self.core_extents), 0
        for mode in order:
            extents[mode] = self.dims[mode]
            macs += prod(extents) * self.rank[mode]
        return macs

    @property
    def prepare_macs(self) -> int:
        """Multiply-accumulates of the core's train, if any."""
        return 0 if self.train is None else self.train.compose_macs

    @property
    def expand_held(self) -> list[int]:
        """Entries of the core, if it is a train, and of all mode products but the last."""
        extents = list(self.core_extents)
        held = [] if self.train is None else [*self.train.expand_held, prod(extents)]
        for mode in self.order[:-1]:
            extents[mode] = self.dims[mode]
            held.append(prod(extents))
        return held

    @property
    def contract_macs(self) -> int:
        """Multiply-accumulates of the Gram matrices, and of the core with each of them."""
        grams = sum([d * rank * rank for d, rank in zip(self.dims, self.rank, strict=False)])
        return grams + prod(self.core_extents) * (sum(self.rank) + 1) + self.prepare_macs

    @property
    def gradient_macs(self) -> int:
        """Multiply-accumulates of the Gram matrices, and of the core with all of them and with all but one."""
        grams = sum([d * rank * rank for d, rank in zip(self.dims, self.rank, strict=False)])
        train = 4 * self.prepare_macs  # forward, and again with a backward pass
        return 2 * grams + (len(self.rank) + 1) * prod(self.core_extents) * sum(self.rank) + train

    @property
    def held_channels(self) -> int:
        """Channels of all mode products but the last, and of the core between them."""
        after = sum([after for _, after, _ in self._mode_products()])
        return after + prod(self.rank[: self.chain_boundary]) - self.shape.out_channels

    def chain_macs(self, call: Call) -> int:
        """Return the multiply-accumulates of one call; a linear runs mode by mode."""
        if self.shape.size:
            return super().chain_macs(call)
        modes = sum([before * after // shared for before, after, shared in self._mode_products()])
        return call.outputs * (prod(self.core_extents) + modes)

    def decompose_tensor(
        self,
        tensor: Tensor,  # (..., *dims)
        method: Method = "auto",
    ) -> Cores:
        """Return the HOSVD after ``refinements``, all cores scaled to one norm."""
        batch = tensor.dim() - len(self.dims)
        core, factors = hosvd.hosvd(tensor, (*self.rank, *[None] * self.kept), self.refinements, method)
        present = [factor for factor in factors if factor is not None]
        cores: Cores = (core,)
        if self.train is not None:
            rest = hosvd.project(tensor.to(core.dtype), [None, *factors[1:]])  # (..., d₁, R₂, …)
            first, *others = right_to_left(rest, len(self.dims))
            cores = ((present[0].mT @ first.squeeze(-3)).unsqueeze(-3), *others)
        return tuple(part.to(tensor.dtype) for part in balanced((*cores, *present), batch))

    def expand(self, cores: Sequence[Tensor]) -> Tensor:  # (..., *dims)
        """Multiply the core by the factors in the cheapest order."""
        core, factors = self.parts(cores)
        return hosvd.tucker_expand(core, factors, self.order)

    def truncate(self, cores: Sequence[Tensor], target: Format) -> Cores:
        """Return the tensor in ``target``: the HOSVD of the core once its factors are orthonormal."""
        half = cores[0].dtype in (torch.float16, torch.bfloat16)
        if half or not isinstance(target, TuckerFormat) or target.train is not None:
            return super().truncate(cores, target)
        core, factors = self.parts(cores)
        split = [None if factor is None else torch.linalg.qr(factor) for factor in factors]
        core = hosvd.tucker_expand(core, [None if pair is None else pair.R for pair in split])
        core, small = hosvd.hosvd(core, (*target.rank, *[None] * self.kept), target.refinements, "exact")
        whole = [pair.Q @ s for pair, s in zip(split, small, strict=True) if pair is not None and s is not None]
        return balanced((core, *whole), core.dim() - len(self.dims))

    def parts(self, cores: Sequence[Tensor]) -> tuple[Tensor, hosvd.Factors]:
        """Return the core as one tensor, and a factor or None per mode."""
        count = len(cores) - len(self.rank)
        factors: hosvd.Factors = [*cores[count:], *[None] * self.kept]
        return (cores[0] if self.train is None else self.train.expand(cores[:count])), factors

    def contracted_norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Multiply the core by the factors' Gram matrices."""
        return hosvd.tucker_norm_squared(*self.parts(cores))

    def contracted_gradients(self, cores: Sequence[Tensor]) -> Cores:
        """Multiply by Gram matrices, and pull the core's gradient back through its train, if any."""
        core, factors = self.parts(cores)
        of_core, of_factors = hosvd.tucker_gradients(core, factors)
        first: Cores = (of_core,)
        if self.train is not None:
            first = pull_back(self.train.expand, cores[: len(cores) - len(self.rank)], of_core)
        return (*first, *[gradient for gradient in of_factors if gradient is not None])

    def chain_weights(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return the factors of the inputs, the core, and the factors of the outputs, as three matrices or kernels."""
        core, present = self.parts(cores)[0], cores[-len(self.rank) :]
        outputs, inputs = reduce(torch.kron, present[: self.boundary]), reduce(torch.kron, present[self.boundary :])
        ones = (1,) * len(self.shape.size)
        middle = core.reshape(outputs.shape[1], inputs.shape[1], *self.shape.size)
        return [inputs.mT.reshape(*inputs.mT.shape, *ones), middle, outputs.reshape(*outputs.shape, *ones)]

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
        """Apply the weight to an input; a linear chain runs mode by mode, which is cheaper than three matrices."""
        if way != "chain" or geometry is not None or transposed:
            return super().run(way, x, cores, bias, geometry, adjust, transposed)
        boundary = self.chain_boundary
        core, present = self.parts(cores)[0], cores[-len(self.rank) :]
        x = hosvd.multiply_modes(x.unflatten(-1, self.dims[boundary:]), [factor.mT for factor in present[boundary:]])
        matrix = core.reshape(prod(self.rank[:boundary]), -1)
        y = F.linear(x.flatten(-len(present) + boundary), matrix).unflatten(-1, self.rank[:boundary])
        y = hosvd.multiply_modes(y, present[:boundary]).flatten(-boundary)
        return y if bias is None else y + bias.to(y.dtype)

    def _mode_products(self) -> list[tuple[int, int, int]]:
        """Return, per mode product, the channels before and after it, and those of the modes that it does not touch."""
        boundary, count = self.boundary, len(self.rank)
        sides = [
            (self.dims[boundary:count], self.rank[boundary:]),
            (self.rank[:boundary], self.dims[:boundary]),
        ]
        return [
            (
                prod(old[: mode + 1]) * prod(new[mode + 1 :]),
                prod(old[:mode]) * prod(new[mode:]),
                prod(old[:mode]) * prod(new[mode + 1 :]),
            )
            for old, new in sides
            for mode in reversed(range(len(old)))
        ]


@dataclass(frozen=True, repr=False)
class Tucker(TensorScheme):
    """A weight, folded into several dimensions, as a Tucker tensor: a core with a matrix per dimension.

    As for ``TensorTrain``, but the rank of a dimension is ``round(scale · dimension)``, at most what the others allow,
    and a convolution is by default decomposed on its channels alone: 1×1, a k×k core, 1×1. ``refinements`` rounds of
    HOOI follow the HOSVD. ``core`` is ``"whole"``, or ``"train"`` as in the paper's experiments, the default with
    ``separable=True`` (docs/tensor.md).

    Raises:
        ValueError: ``dims`` and ``order`` are both given, or an argument has a wrong value.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(32, 64, 3))
        >>> model = fz.factorize(model, fz.Tucker(), rank_scale=0.25, keep_first_and_last=False)
        >>> model[0].format.dims, model[0].rank
        ((64, 32, 3, 3), (16, 8))
    """

    core: CoreKind | None = None
    refinements: int = 0

    name: ClassVar[str] = "tucker"
    formats: ClassVar[tuple[type[Format], ...]] = (TuckerFormat, Separable)
    keeps_kernels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.core is not None:
            check_choice("core", self.core, ("whole", "train"))
        check_whole("refinements", self.refinements, least=0)

    def smallest(self, shape: KernelShape, dims: tuple[int, ...]) -> TuckerFormat:
        """Return the Tucker tensor of rank 1."""
        ranks = (1,) * (len(dims) - kept_modes(shape, dims))
        return TuckerFormat(shape, dims, ranks, self.core or ("train" if self.separable else "whole"), self.refinements)


def kept_modes(shape: KernelShape, dims: tuple[int, ...]) -> int:
    """Return how many trailing dimensions are the kernel's own, which a Tucker tensor keeps whole."""
    count = len(shape.size)
    return count if count and len(dims) > count and dims[-count:] == shape.size else 0
