"""A scheme: which format a layer gets at which rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, ClassVar, Literal, Self

from torch import nn

from factorized.formats.format import Format, Rank
from factorized.formats.kernel import KernelShape

Start = Literal["spectral", "default"]
LARGEST_SCALE = 1000  # rank over full rank: anything above is a mistake and would not fit into memory


def scaled_rank(reference: int, scale: float) -> int:
    """Return the rank at a rank scale: the paper's ``round(scale · reference)``, at least 1."""
    return max(1, round(scale * reference))


class Scheme(ABC):
    """A recipe for formats, without a shape: a frozen value. Abstract."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every scheme is a dataclass
    name: ClassVar[str]  # in plans and recipes
    formats: ClassVar[tuple[type[Format], ...]]  # the formats that it makes, for reading plans
    init: ClassVar[Start] = "spectral"  # how cores are filled unless the user says otherwise
    compresses: ClassVar[bool] = True  # a layer that would not become smaller stays dense
    least_scale: ClassVar[float] = 0.0  # lowest rank over full rank
    by_spectrum: ClassVar[bool] = False  # the weight's singular values tell what a rank keeps

    @abstractmethod
    def at_scale(self, shape: KernelShape, scale: float) -> Format:
        """Return the format at a rank scale, of rank 1 or more, clipped to what is possible."""

    @abstractmethod
    def at_rank(self, shape: KernelShape, rank: Rank) -> Format:
        """Return the format at a given rank; raise where that is not possible."""

    @abstractmethod
    def reference(self, shape: KernelShape) -> int:
        """Return the sum of the ranks that the rank scale multiplies."""

    @property
    def rank_scale(self) -> float | None:
        """The scale to use when no budget is given; None if a budget is required."""
        return None

    def kernel(self, weight_shape: Sequence[int], groups: int = 1) -> KernelShape:
        """Return the shape of a weight, with the matrix that the scheme reads it as."""
        return KernelShape.of(weight_shape, groups)

    def refuse(self, module: nn.Module, shape: KernelShape) -> str | None:
        """Return why this scheme leaves a layer dense, or None."""
        return None

    def clipped(self, shape: KernelShape, scale: float | None, rank: int | None) -> str | None:
        """Return a note on the ranks that are clipped to what the weight allows, or None."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the scheme as JSON-ready values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"name": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}

    @classmethod
    def read(cls, settings: dict[str, Any]) -> Self:
        """Undo ``to_dict``, without the name."""
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(given)})"
