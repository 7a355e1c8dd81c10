"""A format: how a weight is held in cores, how it runs, what it costs and how it is measured.

Layers, decay, plans and files use formats only through this interface. A new one is a subclass of ``Format`` and a
``Scheme`` that chooses it (``scheme.py``); ``factorized.testing`` has the contract that both must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, dataclass, fields, replace
from math import prod
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from factorized.formats.alignment import aligned, gains_from_alignment
from factorized.formats.calibration import Moment, refined, regularized
from factorized.formats.convolution import Geometry, convolve, convolve_transposed, is_channels_last
from factorized.formats.cost import Device
from factorized.formats.kernel import KernelShape, to_matrix

Way = Literal["composed", "chain", "products"]
Rank = int | tuple[int, ...]
Cores = tuple[Tensor, ...]  # each (..., *one of the core shapes), in the order of ``Format.cores``
Fill = Callable[[Tensor], object]  # fills a tensor in place, like those of torch.nn.init
Adjust = Callable[[Tensor], Tensor]  # changes a composed weight: drops entries, or decays it
WAYS: tuple[Way, ...] = ("composed", "chain", "products")


@dataclass(frozen=True)
class Step:
    """One plain layer of a chain: a linear, or a convolution that spans some of the spatial dimensions."""

    inputs: int
    outputs: int
    size: tuple[int, ...] = ()  # of its kernel: 1 in every spatial dimension that it does not span
    groups: int = 1
    spans: tuple[int, ...] = ()  # the spatial dimensions whose stride, padding and dilation this step applies
    shuffle: int = 1  # groups of the ``nn.ChannelShuffle`` that follows; 1 shuffles nothing

    @property
    def macs(self) -> int:
        """Multiply-accumulates per output position: one per weight."""
        return self.outputs * (self.inputs // self.groups) * prod(self.size)


@dataclass(frozen=True)
class Call:
    """The sizes in one call of a layer."""

    batch: int  # positions outside the spatial dimensions
    before: tuple[int, ...] = ()  # spatial extents of the input
    after: tuple[int, ...] = ()  # of the output
    looked_up: bool = False  # an embedding's lookup, which multiplies nothing when dense
    whole: bool = False  # the module takes the composed weight

    def positions(self, spanned: Collection[int]) -> int:
        """Return the positions that are left once the strides of the ``spanned`` dimensions have acted."""
        extents = zip(self.before, self.after, strict=True)
        return self.batch * prod([after if d in spanned else before for d, (before, after) in enumerate(extents)])

    @property
    def outputs(self) -> int:
        """Positions of the output."""
        return self.batch * prod(self.after)


class Format(ABC):
    """The shape of a weight and of the cores it is held in: a frozen value. Abstract.

    Functions of cores take leading batch dimensions, all the same, so that equal formats of many layers are one call.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every format is a dataclass
    name: ClassVar[str]  # in plans and files
    shape: KernelShape  # of the weight
    rank: Rank  # one rank, or several
    is_product: ClassVar[bool] = False  # the cores are ``U``, inner matrices and ``V``, stacked by groups
    frozen: ClassVar[tuple[str, ...]] = ()  # cores that are never trained
    row_core: ClassVar[str | None] = None  # the core whose rows are the weight's rows, if there is one
    # Plain layers that, applied in order, equal the weight; None where it has to be composed.
    chain: tuple[Step, ...] | None = None

    @property
    def keeps_zero_rows(self) -> bool:
        """Whether a row of zeros stays zero when the weight is approximated, and in training without a gradient."""
        return self.row_core is not None

    @property
    @abstractmethod
    def cores(self) -> dict[str, tuple[int, ...]]:
        """The shape of every core by its name in a state dict, such as "U", "inner.0" or "cores.2"."""

    @abstractmethod
    def decompose(
        self,
        weights: Tensor,  # (..., out, in/groups, *size)
        *,
        exact: bool = False,
    ) -> Cores:
        """Return the cores of the best approximation that the format can compute (section 3.1); exact at full rank.

        ``exact`` asks for exact SVDs where the format would take faster ones.
        """

    def calibrate(
        self,
        weight: Tensor,  # (out, in/groups, *size)
        moments: Sequence[Moment],  # of the inputs of every layer that has this weight
    ) -> Cores:
        """Return cores that keep the outputs for such inputs, with no larger error than those of ``decompose``.

        The default is a local optimum, and needs a ``compose`` that is linear in every core.
        """
        exact = weight.double()
        moments = [regularized(moment, exact, self.shape) for moment in moments]
        cores = refined(self.compose, self.decompose(exact), exact, moments, self.shape)
        return tuple([core.to(weight.dtype) for core in cores])

    @abstractmethod
    def compose(self, cores: Sequence[Tensor]) -> Tensor:  # (..., out, in/groups, *size)
        """Return the weight that the cores stand for. Differentiable."""

    @abstractmethod
    def raised(self) -> Sequence[Self]:
        """Return the formats of the next higher ranks; empty at the highest."""

    def lowered(self) -> Sequence[Self]:
        """Return the formats of the next lower ranks; empty at the lowest. The default is for formats of one rank."""
        if isinstance(self.rank, tuple):
            raise NotImplementedError(f"{self.name} has several ranks; define lowered() for it")
        return [replace(self, rank=self.rank - 1)] if self.rank > 1 else []

    def adjusted(self, cores: Sequence[Tensor], adjust: Adjust | None) -> Tensor:  # (..., out, in/groups, *size)
        """Return the weight, with ``adjust`` applied to the part that decay acts on. Differentiable."""
        weight = self.compose(cores)
        return weight if adjust is None else adjust(weight)

    def core_dtype(self, name: str) -> torch.dtype | None:
        """Return the type that a core is kept in; None for that of the layer."""
        return None

    @property
    def numel(self) -> int:
        """Entries of all cores."""
        return sum([prod(extents) for extents in self.cores.values()])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank, or all of them where there are several."""
        return self.rank if isinstance(self.rank, tuple) else (self.rank,)

    @property
    def height(self) -> int:
        """All ranks together: what grows from one format to the next."""
        return sum(self.ranks)

    def norm_squared(self, cores: Sequence[Tensor]) -> Tensor:  # (...)
        """Return the squared Frobenius norm of the weight (section 3.2). Differentiable."""
        return self.compose(cores).flatten(-len(self.shape.weight_shape)).square().sum(-1)

    def gradients(self, cores: Sequence[Tensor]) -> Cores:  # like cores
        """Return the gradients of half the squared norm.

        Its gradient with respect to the weight is the weight itself, which is pulled back to the cores.
        """
        return pull_back(self.compose, cores)

    def truncate(self, cores: Sequence[Tensor], target: Format) -> Cores:  # those of target
        """Return the weight's cores in a format of lower ranks, by decomposing the composed weight into ``target``."""
        return target.decompose(self.compose(cores))

    def spectrum(self, cores: Sequence[Tensor]) -> Tensor:  # (..., groups, singular values)
        """Return the singular values of the weight, read as the matrices of its shape."""
        return torch.linalg.svdvals(to_matrix(self.compose(cores), self.shape))

    def plus(
        self,
        cores: Sequence[Tensor],
        U: Tensor,  # (rows, r)
        V: Tensor,  # (columns, r)
    ) -> tuple[Format, Cores]:
        """Return the format and cores of the weight plus ``U Vᵀ``, exactly."""
        raise ValueError(
            f"a weight in {self.describe()} cannot absorb a product exactly; make it dense first with fz.compose(model)"
        )

    @property
    def matrix_rank(self) -> int:
        """The highest rank that the weight's matrix can have, in every group."""
        return self.shape.full_rank

    @property
    def decayed(self) -> tuple[Format, int]:
        """The format whose norm a decay penalizes, and how many of the leading cores belong to it."""
        return self, len(self.cores)

    @torch.no_grad()
    def draw(self, cores: Sequence[Tensor], fill: Fill) -> None:
        """Fill the cores at random, so that the weight has the mean square that ``fill`` gives a dense one."""
        dense = torch.empty(self.shape.weight_shape, device=cores[0].device, dtype=torch.float32)
        fill(dense)
        draw_to_scale(self, cores, dense.square().mean())

    def chain_weights(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights of the chain in the order they are applied, each (outputs, inputs/groups, *size)."""
        raise NotImplementedError(f"{self.name} has no chain")

    @property
    def _steps(self) -> tuple[Step, ...]:
        """The chain of a format that has one."""
        if self.chain is None:
            raise NotImplementedError(f"{self.name} has no chain")
        return self.chain

    @property
    def compose_macs(self) -> int:
        """Multiply-accumulates of ``compose``."""
        return 0

    @property
    def prepare_macs(self) -> int:
        """Multiply-accumulates of ``chain_weights``."""
        return 0

    @property
    def has_thin_rows(self) -> bool:
        """Whether an embedding looks up rows of the chain's last weight and widens them; else it composes its table."""
        return self.chain is not None and all(step.groups == 1 for step in self.chain)

    def macs(self, call: Call) -> int:
        """Return the multiply-accumulates of one call, run in the way that needs fewer."""
        if call.looked_up:
            if not self.has_thin_rows:
                return self.compose_macs
            return call.batch * sum([step.macs for step in self._steps[:-1]]) + self.prepare_macs
        composed = call.outputs * self.shape.numel + self.compose_macs
        return (
            composed if self.chain is None or call.whole else min(composed, self.chain_macs(call) + self.prepare_macs)
        )

    def chain_macs(self, call: Call) -> int:
        """Return the multiply-accumulates of one call as a chain."""
        spanned: set[int] = set()
        total = 0
        for step in self._steps:
            spanned.update(step.spans)
            total += step.macs * call.positions(spanned)
        return total

    def ways(self, stride: tuple[int, ...], device: Device, compiled: bool) -> dict[Way, float]:
        """Return what each way of running costs per output position, in multiply-accumulates; the first wins a tie."""
        return {"composed": 0.0}

    def run(
        self,
        way: Way,
        x: Tensor,  # (..., in), or (batch, in, *spatial)
        cores: Sequence[Tensor],
        bias: Tensor | None,  # (out,)
        geometry: Geometry | None,  # None for a linear
        adjust: Adjust | None = None,  # of the composed weight
        transposed: bool = False,
    ) -> Tensor:  # (..., out), or (batch, out, *spatial)
        """Apply the weight to an input; ``transposed``, apply its transpose, with in and out exchanged."""
        if way == "composed":
            weight = self.adjusted(cores, adjust)
            return apply_weight(weight, x, bias, geometry, self.shape.groups, transposed)
        run = run_chain_transposed if transposed else run_chain
        return run(self._steps, self.chain_weights(cores), x, bias, geometry)

    def plain(self, cores: Sequence[Tensor]) -> list[tuple[Step, Tensor]]:
        """Return the chain and its weights for deployment; empty where there is no chain."""
        return [] if self.chain is None else list(zip(self.chain, self.chain_weights(cores), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that rebuild the format, given its shape."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name != "shape"}
        return {"name": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}}

    @classmethod
    def read(cls, shape: KernelShape, settings: dict[str, Any]) -> Self:
        """Undo ``to_dict``, without the name."""
        plain = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        return cls(shape, **plain)  # type: ignore[call-arg]  # the subclass's fields, which start with the shape

    @staticmethod
    def part_shape(shape: KernelShape) -> KernelShape:
        """Return the shape of the weight that a nested format holds, where there is one."""
        return shape

    def describe(self) -> str:
        """Return the settings for a layer's repr."""
        return f"format={self.name}, rank={self.rank}"


def apply_weight(
    weight: Tensor,  # (out, in/groups, *size)
    x: Tensor,  # (..., in), or (batch, in, *spatial)
    bias: Tensor | None,
    geometry: Geometry | None,  # None for a linear
    groups: int,
    transposed: bool,
) -> Tensor:
    """Apply a dense weight, or its transpose, to an input."""
    if geometry is None:
        return F.linear(x, weight.mT if transposed else weight, bias)
    return (convolve_transposed if transposed else convolve)(x, weight, bias, geometry, groups)


def run_chain(
    chain: Sequence[Step],
    weights: Sequence[Tensor],
    x: Tensor,  # (..., in), or (batch, in, *spatial)
    bias: Tensor | None,
    geometry: Geometry | None,
) -> Tensor:
    """Apply plain layers one after the other, the last one with the bias."""
    last = len(chain) - 1
    weights = _aligned(chain, weights, x, geometry)
    for place, (step, weight) in enumerate(zip(chain, weights, strict=True)):
        own_bias = bias if place == last else None
        if geometry is not None:
            x = convolve(x, weight, own_bias, geometry.only(step.spans), step.groups)
            x = x if step.shuffle == 1 else _shuffled(x, step.shuffle, x.dim() - 1 - len(step.size))
        elif step.groups == 1:
            x = F.linear(x, weight, own_bias)
        else:
            x = _block_linear(x, weight, own_bias, step.groups)
            x = x if step.shuffle == 1 else _shuffled(x, step.shuffle, x.dim() - 1)
    return x


def run_chain_transposed(
    chain: Sequence[Step],
    weights: Sequence[Tensor],
    x: Tensor,  # (..., out), or (batch, out, *spatial)
    bias: Tensor | None,  # (in,)
    geometry: Geometry | None,
) -> Tensor:  # (..., in), or (batch, in, *spatial)
    """Apply the transposed weight of a chain, the last step first."""
    weights = _aligned(chain, weights, x, geometry)
    for place, (step, weight) in reversed(list(enumerate(zip(chain, weights, strict=True)))):
        own_bias = bias if place == 0 else None
        channels = x.dim() - 1 - len(step.size)
        x = x if step.shuffle == 1 else _shuffled(x, x.shape[channels] // step.shuffle, channels)
        if geometry is not None:
            x = convolve_transposed(x, weight, own_bias, geometry.only(step.spans), step.groups)
        elif step.groups == 1:
            x = F.linear(x, weight.mT, own_bias)
        else:
            blocks = weight.unflatten(0, (step.groups, -1)).transpose(1, 2)
            x = _block_linear(x, blocks.flatten(0, 1), own_bias, step.groups)
    return x


def _aligned(
    chain: Sequence[Step], weights: Sequence[Tensor], x: Tensor, geometry: Geometry | None
) -> Sequence[Tensor]:
    """Return the weights of linears, padded between each other where that is faster."""
    if geometry is None and gains_from_alignment(x, weights) and all(step.groups == 1 for step in chain):
        return aligned(weights)
    return weights


def pull_back(expand: Callable[[Sequence[Tensor]], Tensor], cores: Sequence[Tensor], at: Tensor | None = None) -> Cores:
    """Return the gradients of ⟨``at``, expand(cores)⟩; ``at`` is the expansion itself unless given."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [core.detach().clone().requires_grad_() for core in cores]  # what inference made records nothing
        tensor = expand(leaves)
        return torch.autograd.grad(tensor, leaves, tensor.detach() if at is None else at)


def draw_to_scale(format: Format, cores: Sequence[Tensor], mean_square: Tensor) -> None:
    """Fill cores with Gaussian numbers, all of one norm, so that the weight has this mean square."""
    # The norm of a long train is beyond float32, even where all of its cores have norm 1.
    drawn = [torch.randn(core.shape, device=core.device, dtype=torch.float32).double() for core in cores]
    drawn = [core / core.norm() for core in drawn]
    scale = mean_square * format.shape.numel / format.norm_squared(drawn)  # of the squared norm of the weight
    for core, value in zip(cores, drawn, strict=True):
        core.copy_(value * scale ** (1 / (2 * len(cores))))


def _block_linear(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:  # (..., out)
    """Multiply by a block-diagonal matrix whose blocks are stacked by rows in ``weight`` (out, in/groups)."""
    blocks = weight.unflatten(0, (groups, -1))  # (groups, out/groups, in/groups)
    y = torch.einsum("...gi,goi->...go", x.unflatten(-1, (groups, -1)), blocks).flatten(-2)
    return y if bias is None else y + bias.to(y.dtype)


def _shuffled(x: Tensor, groups: int, dim: int) -> Tensor:
    """Shuffle channels as ``nn.ChannelShuffle`` does, in the layout of the input."""
    if dim == 1 and is_channels_last(x):
        return _shuffled(x.movedim(1, -1), groups, x.dim() - 1).movedim(-1, 1)
    return x.unflatten(dim, (groups, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)
