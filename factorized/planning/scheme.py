"""The ways of factorizing a weight, and the rank each gives a layer at a given scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from factorized.maths.folding import Rank
from factorized.maths.kernel import KernelShape, Kind
from factorized.planning.cost import Call, LayerCost
from factorized.planning.tensor_scheme import (
    TensorTrain,
    Tucker,
    tensor_scheme_from_dict,
    tensor_scheme_to_dict,
)

Variant = Literal["full", "deep", "wide"]
LARGEST_SCALE = 1000  # of full rank: far above any use, and far below what no memory holds


class _MatrixScheme(ABC):
    """What the schemes share that make a weight a product of matrices. Abstract."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Inner matrices between the factors."""

    def refuse(self, module: nn.Module, shape: KernelShape) -> str | None:
        """Return why the scheme leaves a layer alone that others would not: never."""
        return None

    def cost(self, shape: KernelShape, multiplied: tuple[Call, ...], looked_up: tuple[Call, ...]) -> LayerCost:
        """Return what a weight costs at any rank."""
        return LayerCost(shape, self.depth, multiplied, looked_up)

    def reference(self, shape: KernelShape) -> int:
        """Return what the rank scale multiplies."""
        return reference_size(shape)

    def higher_ranks(self, shape: KernelShape, rank: Rank) -> list[Rank]:
        """Return the next ranks up: one."""
        assert isinstance(rank, int)
        return [rank + 1]

    def lower_ranks(self, shape: KernelShape, rank: Rank) -> list[Rank]:
        """Return the next ranks down: one, or none."""
        assert isinstance(rank, int)
        return [rank - 1] if rank > 1 else []


@dataclass(frozen=True)
class LowRank(_MatrixScheme):
    """``W = U Vᵀ`` with a rank below full, for smaller and faster layers (section 2).

    ``kind="spatial"`` is the paper's pair of one-dimensional convolutions; ``"channel"`` is k×k then 1×1.
    """

    kind: Kind = "spatial"

    def __post_init__(self) -> None:
        _check("kind", self.kind, ("spatial", "channel"))

    @property
    def depth(self) -> int:
        """Inner matrices between the factors."""
        return 0

    @property
    def rank_scale(self) -> float | None:
        """The scale to use when no budget is given: there is none for low rank."""
        return None

    @property
    def init(self) -> Literal["spectral"]:
        """How the factors are filled unless the user says otherwise."""
        return "spectral"

    @property
    def compresses(self) -> bool:
        """Whether a layer that would not become smaller stays dense."""
        return True

    def rank(self, shape: KernelShape, scale: float) -> int:
        """Return the paper's rank for ``scale``, at least 1 and at most full."""
        return min(scaled_rank(shape, scale), shape.full_rank)

    def checked_rank(self, shape: KernelShape, name: str, rank: int) -> int:
        """Return a rank that was asked for; raise if it is above full."""
        if rank > shape.full_rank:
            raise ValueError(
                f"rank must be in 1..{shape.full_rank} for layer {name!r} ({shape}), got {rank}; "
                'use Overcomplete("wide") to go above full rank, or exclude= this layer'
            )
        return rank


@dataclass(frozen=True)
class Overcomplete(_MatrixScheme):
    """``W = U Vᵀ`` (``"full"``, ``"wide"``) or ``U M Vᵀ`` (``"deep"``) at or above full rank (section 5).

    Trained as a product and deployed as its composition: ``"full"`` and ``"deep"`` have rank scale 1, ``"wide"`` has
    ``width``.
    """

    variant: Variant = "full"
    width: float = 3
    kind: Kind = "spatial"

    def __post_init__(self) -> None:
        _check("variant", self.variant, ("full", "deep", "wide"))
        _check("kind", self.kind, ("spatial", "channel"))
        if not 1 <= self.width <= LARGEST_SCALE:
            raise ValueError(f"width must be in 1..{LARGEST_SCALE} (it multiplies full rank), got {self.width!r}")

    @property
    def depth(self) -> int:
        """Inner matrices between the factors."""
        return 1 if self.variant == "deep" else 0

    @property
    def rank_scale(self) -> float:
        """The scale to use when no budget is given."""
        return self.width if self.variant == "wide" else 1.0

    @property
    def init(self) -> Literal["default"]:
        """How the factors are filled unless the user says otherwise."""
        return "default"

    @property
    def compresses(self) -> bool:
        """Whether a layer that would not become smaller stays dense: it may grow."""
        return False

    def rank(self, shape: KernelShape, scale: float) -> int:
        """Return the paper's rank for ``scale``, at least full, with no upper limit."""
        return max(scaled_rank(shape, scale), shape.full_rank)

    def lower_ranks(self, shape: KernelShape, rank: Rank) -> list[Rank]:
        """Return the next ranks down: one, or none at full rank."""
        return super().lower_ranks(shape, rank) if rank != shape.full_rank else []

    def checked_rank(self, shape: KernelShape, name: str, rank: int) -> int:
        """Return a rank that was asked for; raise if it is below full, or if nothing could hold it."""
        least, most = shape.full_rank, LARGEST_SCALE * shape.full_rank
        if not least <= rank <= most:
            raise ValueError(
                f"rank must be in {least}..{most}, full rank to {LARGEST_SCALE} times that, for Overcomplete layer "
                f"{name!r} ({shape}), got {rank}; use LowRank() for less"
            )
        return rank


Scheme = LowRank | Overcomplete | TensorTrain | Tucker


def scaled_rank(shape: KernelShape, scale: float) -> int:
    """Return ``round(scale · out·kh)`` for convolutions and ``round(scale · min(m, n))`` for matrices, at least 1."""
    return max(1, round(scale * reference_size(shape)))


def reference_size(shape: KernelShape) -> int:
    """Return what the rank scale multiplies: a convolution's matrix rows, a matrix's shorter side."""
    return shape.rows if shape.size else shape.full_rank


def scheme_to_dict(scheme: Scheme) -> dict[str, Any]:
    """Return a JSON-ready description of ``scheme``."""
    if isinstance(scheme, (TensorTrain, Tucker)):
        return tensor_scheme_to_dict(scheme)
    if isinstance(scheme, LowRank):
        return {"name": "low_rank", "kind": scheme.kind}
    return {"name": "overcomplete", "variant": scheme.variant, "width": scheme.width, "kind": scheme.kind}


def scheme_from_dict(data: dict[str, Any]) -> Scheme:
    """Undo ``scheme_to_dict``."""
    fields = {key: value for key, value in data.items() if key != "name"}
    if data.get("name") == "low_rank":
        return LowRank(**fields)
    if data.get("name") == "overcomplete":
        return Overcomplete(**fields)
    if data.get("name") in ("tensor_train", "tucker"):
        return tensor_scheme_from_dict(data)
    names = '"low_rank", "overcomplete", "tensor_train" or "tucker"'
    raise ValueError(f"scheme name must be {names}, got {data.get('name')!r}")


def _check(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        quoted = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be one of {quoted}, got {value!r}")
