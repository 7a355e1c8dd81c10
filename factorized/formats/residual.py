"""A weight as the sum of a trained part in another format and a frozen rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from factorized._checks import check_choice
from factorized.formats.calibration import Moment
from factorized.formats.convolution import Geometry
from factorized.formats.cost import Device
from factorized.formats.format import Adjust, Call, Cores, Fill, Format, Rank, Way, apply_weight
from factorized.formats.kernel import KernelShape
from factorized.formats.product import LowRank
from factorized.formats.scheme import Scheme

TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}  # of the types that need a scale for every row
REST, SCALE = "residual", "residual_scale"


@dataclass(frozen=True)
class ResidualFormat(Format):
    """``W = part + R``: the cores of ``part`` are trained, ``R`` is frozen and may be kept in another ``dtype``.

    A decay penalizes the part alone. In types of one byte, every row of ``R`` has a scale.
    """

    shape: KernelShape
    part: Format
    dtype: str | None = None  # of the rest; None for that of the layer
    rank: Rank = field(init=False, compare=False, repr=False)

    name: ClassVar[str] = "residual"
    frozen: ClassVar[tuple[str, ...]] = (REST, SCALE)

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, tuple(TYPES))
        object.__setattr__(self, "rank", self.part.rank)

    @property
    def keeps_zero_rows(self) -> bool:
        """Whether the part keeps rows of zeros; the rest is never trained."""
        return self.part.keeps_zero_rows

    @property
    def cores(self) -> dict[str, tuple[int, ...]]:
        """The cores of the part, then the rest of the weight, and its scales where it has them."""
        rows = (self.shape.out_channels, *(1,) * (len(self.shape.weight_shape) - 1))
        scale = {SCALE: rows} if self.dtype in LARGEST else {}
        return {**self.part.cores, REST: self.shape.weight_shape, **scale}

    def core_dtype(self, name: str) -> torch.dtype | None:
        """Return the type of the rest."""
        return TYPES[self.dtype] if name == REST and self.dtype is not None else None

    @property
    def decayed(self) -> tuple[Format, int]:
        """The format that a decay of the part penalizes."""
        return self.part.decayed

    def decompose(
        self,
        weights: Tensor,  # (..., out, in/groups, *size)
        *,
        exact: bool = False,
    ) -> Cores:
        """Decompose the part and keep the remainder, so that the weight is the same up to rounding."""
        return self._with_rest(weights, self.part.decompose(weights, exact=exact))

    def calibrate(
        self,
        weight: Tensor,  # (out, in/groups, *size)
        moments: Sequence[Moment],
    ) -> Cores:
        """Calibrate the part and keep the remainder, so that what matters most to the outputs is trained."""
        return self._with_rest(weight, self.part.calibrate(weight, moments))

    def _with_rest(self, weights: Tensor, cores: Cores) -> Cores:
        rest = weights - self.part.compose(cores)
        if self.dtype is None or self.dtype not in LARGEST:
            return (*cores, rest.to(self.core_dtype(REST) or weights.dtype))
        own, largest = tuple(range(-len(self.shape.weight_shape) + 1, 0)), LARGEST[self.dtype]
        scale = rest.abs().amax(dim=own, keepdim=True) / largest
        scale = torch.where(scale == 0, 1, scale)
        scaled = (rest / scale).clamp(-largest, largest)  # which a scale that was rounded down exceeds
        return (*cores, (scaled.round() if self.dtype == "int8" else scaled).to(TYPES[self.dtype]), scale)

    def rest(self, cores: Sequence[Tensor]) -> Tensor:  # (..., out, in/groups, *size)
        """Return the frozen part of the weight, in the type of the trained one.

        It is detached, since ``model.requires_grad_(True)`` also marks frozen parameters as trained.
        """
        rest, *scale = (core.detach() for core in cores[len(self.part.cores) :])
        rest = rest.to(cores[0].dtype)
        return rest * scale[0] if scale else rest

    def compose(self, cores: Sequence[Tensor]) -> Tensor:  # (..., out, in/groups, *size)
        """Add the part and the rest."""
        return self.adjusted(cores, None)

    def adjusted(self, cores: Sequence[Tensor], adjust: Adjust | None) -> Tensor:  # (..., out, in/groups, *size)
        """Add the part, adjusted, and the rest as it is."""
        return self.part.adjusted(self._trained(cores), adjust) + self.rest(cores)

    def _trained(self, cores: Sequence[Tensor]) -> Sequence[Tensor]:
        return cores[: len(self.part.cores)]

    @torch.no_grad()
    def draw(self, cores: Sequence[Tensor], fill: Fill) -> None:
        """Draw the part; the rest is zero."""
        self.part.draw(self._trained(cores), fill)
        rest, *scale = cores[len(self.part.cores) :]
        rest.zero_()
        for one in scale:
            one.fill_(1)

    def plus(self, cores: Sequence[Tensor], U: Tensor, V: Tensor) -> tuple[Format, Cores]:
        """Return the part with ``U Vᵀ`` in it, and the same rest."""
        part, wider = self.part.plus(self._trained(cores), U, V)
        return replace(self, part=part), (*wider, *cores[len(self.part.cores) :])

    @property
    def compose_macs(self) -> int:
        """Multiply-accumulates of the part."""
        return self.part.compose_macs

    def macs(self, call: Call) -> int:
        """Return the multiply-accumulates of the composed weight, or of a dense layer and the part if that is fewer."""
        composed = super().macs(call)
        if call.looked_up or call.whole or self.part.chain is None:
            return composed
        return min(composed, call.outputs * self.shape.numel + self.part.macs(call))

    def ways(self, stride: tuple[int, ...], device: Device, compiled: bool) -> dict[Way, float]:
        """Return the costs of the part, each plus that of a dense layer: the rest, or a composed weight's gradient."""
        dense = float(self.shape.numel)
        return {way: cost + dense for way, cost in self.part.ways(stride, device, compiled).items()}

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
        """Apply part and rest: added into one weight where the part is composed, else separately."""
        if way == "composed":
            return super().run(way, x, cores, bias, geometry, adjust, transposed)
        y = apply_weight(self.rest(cores), x, None, geometry, self.shape.groups, transposed)
        return y + self.part.run(way, x, self._trained(cores), bias, geometry, transposed=transposed)

    def raised(self) -> list[Self]:
        """Return the formats whose part has the next higher ranks."""
        return [replace(self, part=other) for other in self.part.raised()]

    def lowered(self) -> list[Self]:
        """Return the formats whose part has the next lower ranks."""
        return [replace(self, part=other) for other in self.part.lowered()]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, with those of the part nested."""
        return {"name": self.name, "part": self.part.to_dict(), "dtype": self.dtype}

    def describe(self) -> str:
        """Return the settings of the part, and how the rest is kept."""
        return f"residual={self.dtype or 'frozen'}, {self.part.describe()}"


@dataclass(frozen=True, repr=False)
class Residual(Scheme):
    """``W = U Vᵀ + R``: train the leading part of every weight and freeze the rest.

    At the start the model computes the same function up to rounding: ``U Vᵀ`` is the best approximation of ``W`` at its
    rank, and ``R`` is the remainder (PiSSA, Meng et al., 2024). It saves no parameters: ``R`` is as large as ``W``,
    unless ``dtype`` keeps it in fewer bytes. Frobenius decay acts on ``U Vᵀ``, never on ``R``.

    Args:
        part: the scheme of the part that is trained.
        dtype: the type that ``R`` is kept in, None for that of the weight. ``torch.int8`` and ``torch.float8_e4m3fn``
            take one byte an entry, with a scale for every row.

    Raises:
        ValueError: ``part`` is not a scheme, or ``dtype`` is not supported.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> model = fz.factorize(model, fz.Residual(fz.LowRank()), rank=4, keep_first_and_last=False)
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['0.U', '0.V', '0.bias']
    """

    part: Scheme = field(default_factory=LowRank)
    dtype: torch.dtype | str | None = None  # kept as its name, for files

    name: ClassVar[str] = "residual"
    formats: ClassVar[tuple[type[Format], ...]] = (ResidualFormat,)
    compresses: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.part, Scheme) or isinstance(self.part, Residual):
            raise ValueError(f"part must be a scheme such as fz.LowRank(), got {self.part!r}")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
            check_choice("dtype", self.dtype, tuple(TYPES))

    @property
    def _kept(self) -> str | None:
        return None if self.dtype is None else str(self.dtype)

    def at_scale(self, shape: KernelShape, scale: float) -> ResidualFormat:
        """Return the part's format at a rank scale, with a rest."""
        return ResidualFormat(shape, self.part.at_scale(shape, scale), self._kept)

    def at_rank(self, shape: KernelShape, rank: Rank) -> ResidualFormat:
        """Return the part's format at a rank, with a rest."""
        return ResidualFormat(shape, self.part.at_rank(shape, rank), self._kept)

    def reference(self, shape: KernelShape) -> int:
        """Return what the rank scale of the part multiplies."""
        return self.part.reference(shape)

    @property
    def rank_scale(self) -> float | None:
        """The rank scale of the part."""
        return self.part.rank_scale

    def kernel(self, weight_shape: Sequence[int], groups: int = 1) -> KernelShape:
        """Return the shape that the part reads a weight as."""
        return self.part.kernel(weight_shape, groups)

    def refuse(self, module: nn.Module, shape: KernelShape) -> str | None:
        """Return why the part leaves a layer alone, or None."""
        return self.part.refuse(module, shape)

    def clipped(self, shape: KernelShape, scale: float | None, rank: int | None) -> str | None:
        """Return which ranks of the part are clipped, or None."""
        return self.part.clipped(shape, scale, rank)

    def to_dict(self) -> dict[str, Any]:
        """Return the scheme as JSON-ready values."""
        return {"name": self.name, "part": self.part.to_dict(), "dtype": self.dtype}
