"""``fz.TensorTrain`` and ``fz.Tucker``: weights as tensors, and the ranks each gives a layer at a given scale."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any, ClassVar, Literal

from torch import nn

from factorized.maths.folding import Folding, Rank, check_folding, fold
from factorized.maths.kernel import KernelShape, Kind
from factorized.maths.tucker import CoreKind
from factorized.planning.cost import Call
from factorized.planning.tensor_cost import TensorCost


@dataclass(frozen=True, repr=False)
class _TensorScheme:
    """What both tensor schemes share. Abstract."""

    dims: tuple[int, ...] | None = None
    order: int | None = None
    separable: bool = False

    method: ClassVar[str]

    def __post_init__(self) -> None:
        if isinstance(self.dims, list):
            object.__setattr__(self, "dims", tuple(self.dims))
        check_folding(self.method, self.dims, self.order, self.core_kind, self.hooi_rounds)
        if not isinstance(self.separable, bool):
            raise ValueError(f"separable must be True or False, got {self.separable!r}")

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def core_kind(self) -> CoreKind | None:
        """How a Tucker core is held."""
        return None

    @property
    def hooi_rounds(self) -> int:
        """Rounds of refinement after the decomposition."""
        return 0

    @property
    def kind(self) -> Kind:
        """How low rank would read a kernel as a matrix; tensors do not ask."""
        return "spatial"

    @property
    def depth(self) -> int:
        """Inner matrices: none."""
        return 0

    @property
    def rank_scale(self) -> float | None:
        """The scale to use when no budget is given: there is none."""
        return None

    @property
    def init(self) -> Literal["spectral"]:
        """How the cores are filled unless the user says otherwise."""
        return "spectral"

    @property
    def compresses(self) -> bool:
        """Whether a layer that would not become smaller stays dense."""
        return True

    def fold(self, shape: KernelShape) -> Folding:
        """Return how a weight is folded."""
        return fold(shape, self.method, self.dims, self.order, self.core_kind, self.hooi_rounds, self.separable)

    def refuse(self, module: nn.Module, shape: KernelShape) -> str | None:
        """Return why the scheme leaves a layer alone, or None."""
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            return f"{type(self).__name__} decomposes Linear and Conv2d, not {type(module).__name__}"
        if self.separable and (prod(shape.size) == 1 or shape.groups > 1):
            return "separable=True splits ungrouped convolutions with kernels larger than 1x1"
        return None

    def cost(self, shape: KernelShape, multiplied: tuple[Call, ...], looked_up: tuple[Call, ...]) -> TensorCost:
        """Return what a weight costs at any rank."""
        return TensorCost(shape, self.fold(shape), self.separable, multiplied)

    def rank(self, shape: KernelShape, scale: float) -> Rank:
        """Return the ranks for ``scale``, at least 1 and at most full."""
        folding = self.fold(shape)
        return folding.clipped(folding.ranks_at(scale))

    def checked_rank(self, shape: KernelShape, name: str, rank: Rank) -> Rank:
        """Return the ranks that were asked for, clipped to what the dimensions allow."""
        return self.fold(shape).clipped(rank)

    def reference(self, shape: KernelShape) -> int:
        """Return what the rank scale multiplies, of all ranks together."""
        return sum(self.fold(shape).reference_ranks)

    def higher_ranks(self, shape: KernelShape, rank: Rank) -> list[Rank]:
        """Return the next ranks up."""
        assert isinstance(rank, tuple)
        return list(self.fold(shape).raised(rank))

    def lower_ranks(self, shape: KernelShape, rank: Rank) -> list[Rank]:
        """Return the next ranks down."""
        assert isinstance(rank, tuple)
        return list(self.fold(shape).lowered(rank))


@dataclass(frozen=True, repr=False)
class TensorTrain(_TensorScheme):
    """A weight, folded into several dimensions, as a tensor train (section 4 of the paper, Oseledets 2011).

    The dimensions are chosen, given as ``dims`` (their product is the weight's size), or ``order`` nearly equal ones.
    At a rank scale, the rank between two dimensions is ``round(scale · the smaller of them)``, at least 1.
    ``separable=True`` is the block of the paper's experiments: a depthwise convolution, then the pointwise matrix
    folded into three dimensions and decomposed; it leaves all but k×k convolutions alone.
    """

    method: ClassVar[str] = "tensor_train"


@dataclass(frozen=True, repr=False)
class Tucker(_TensorScheme):
    """A weight, folded into several dimensions, as a Tucker tensor: a core with a matrix per dimension.

    As for ``TensorTrain``, but the rank of a dimension is ``round(scale · dimension)``, at most what the others allow,
    and a convolution is by default decomposed on its channels alone: 1×1, a k×k core, 1×1. ``refinements`` rounds of
    HOOI follow the HOSVD. ``core`` is ``"whole"``, or ``"train"`` as in the paper's experiments, and so the default of
    ``separable=True``: see docs/tensor.md.
    """

    core: CoreKind | None = None
    refinements: int = 0

    method: ClassVar[str] = "tucker"

    @property
    def core_kind(self) -> CoreKind | None:
        """How the core is held."""
        return self.core

    @property
    def hooi_rounds(self) -> int:
        """Rounds of HOOI after the HOSVD."""
        return self.refinements


def warn_if_clipped(scheme: TensorTrain | Tucker, asked: float, is_scale: bool, shapes: dict[str, KernelShape]) -> None:
    """Warn, once for all layers, where a rank or a rank scale asks for more than the dimensions allow."""
    clipped = []
    for name, shape in shapes.items():
        folding = scheme.fold(shape)
        wanted = folding.ranks_at(asked) if is_scale else (int(asked),) * len(folding.full_ranks)
        if folding.clipped(wanted) != wanted:
            clipped.append(f"{name!r} ({shape}): {wanted} is clipped to {folding.clipped(wanted)}")
    if clipped:
        warnings.warn(
            f"{'rank_scale' if is_scale else 'rank'}={asked:g} is above what {len(clipped)} of {len(shapes)} layers "
            f"allow, such as {clipped[0]}; the plan shows the real ranks",
            stacklevel=4,
        )


def tensor_scheme_to_dict(scheme: TensorTrain | Tucker) -> dict[str, Any]:
    """Return a JSON-ready description of ``scheme``."""
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(scheme).items()}
    return {"name": scheme.method, **settings}


def tensor_scheme_from_dict(data: dict[str, Any]) -> TensorTrain | Tucker:
    """Undo ``tensor_scheme_to_dict``."""
    settings = {key: value for key, value in data.items() if key != "name"}
    return TensorTrain(**settings) if data["name"] == "tensor_train" else Tucker(**settings)
