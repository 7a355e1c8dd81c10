"""What a plan is: one entry per layer, with its rank or the reason why it is left alone."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from factorized.maths.folding import Rank
from factorized.maths.kernel import KernelShape, Kind
from factorized.maths.tucker import CoreKind
from factorized.planning.html import plan_page
from factorized.planning.scheme import Scheme, scheme_from_dict, scheme_to_dict
from factorized.planning.table import plan_table

FORMAT = 1
# What the fields of a plan in a file must be.
_LEAST = {"shape": 1, "groups": 1, "rank": 1, "depth": 0, "head_ranks": 1, "dims": 1, "refinements": 0} | dict.fromkeys(
    ("params", "params_after", "macs", "macs_after"), 0
)
_LISTS = ("shape", "aliases", "head_ranks", "forms", "dims")
_TEXTS = ("name", "type", "kind", "reason", "aliases", "tied_to", "forms", "method", "core", "model", "budget")
_OPTIONAL = ("rank", "reason", "tied_to", "macs", "macs_after")


@dataclass(frozen=True)
class TensorEntry:
    """How the weight of a layer is held as a tensor."""

    method: str  # "tensor_train" or "tucker"
    dims: tuple[int, ...]  # that the weight is folded into
    core: CoreKind = "whole"
    refinements: int = 0
    separable: bool = False


@dataclass(frozen=True)
class PlanEntry:
    """One layer of a plan: everything needed to build its replacement, and what that saves."""

    name: str
    type: str  # of the dense layer, as in torch.nn
    shape: tuple[int, ...]  # of the dense weight
    groups: int = 1
    rank: Rank | None = None  # None: the layer stays dense; a tensor has several; of attention, a head's smaller one
    kind: Kind = "spatial"
    depth: int = 0
    reason: str | None = None  # why it stays dense
    aliases: tuple[str, ...] = ()  # other names under which the model holds the same module
    tied_to: str | None = None  # the earlier entry whose factors this layer shares
    params: int = 0  # of the weight, dense; 0 where an earlier entry holds it
    params_after: int = 0
    macs: int | None = None  # None without an example input
    macs_after: int | None = None
    tensor: TensorEntry | None = None  # None: a product of matrices
    head_ranks: tuple[int, ...] = ()  # of attention: the sizes of a head's QK and OV; ``shape`` is (heads, head size)
    forms: tuple[str, ...] = ()  # of attention: those that are shrunken

    @property
    def kernel(self) -> KernelShape:
        """The weight's shape and the matrix it is read as."""
        return KernelShape.of(self.shape, self.groups, self.kind)


@dataclass(frozen=True)
class Plan:
    """Which layers of a model are factorized and at which ranks; ``print`` it, or give it to ``fz.factorize``."""

    model: str  # the class the plan was made for
    scheme: Scheme
    budget: str  # as the user wrote it: "ratio=0.1"
    entries: tuple[PlanEntry, ...]
    params: int  # of the whole model
    params_after: int
    macs: int | None = None
    macs_after: int | None = None

    @property
    def ratio(self) -> float:
        """Parameters of the whole model after, over before."""
        return self.params_after / self.params

    @property
    def selected(self) -> tuple[PlanEntry, ...]:
        """The layers to factorize."""
        return tuple(entry for entry in self.entries if entry.rank is not None)

    @property
    def layers(self) -> tuple[PlanEntry, ...]:
        """The layers to factorize that are no attention."""
        return tuple(entry for entry in self.selected if not entry.head_ranks)

    @property
    def attention(self) -> tuple[PlanEntry, ...]:
        """The attention modules to shrink."""
        return tuple(entry for entry in self.selected if entry.head_ranks)

    @property
    def skipped(self) -> tuple[PlanEntry, ...]:
        """The layers that stay dense, each with its reason."""
        return tuple(entry for entry in self.entries if entry.rank is None)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready values."""
        return {
            "format": FORMAT,
            "model": self.model,
            "scheme": scheme_to_dict(self.scheme),
            "budget": self.budget,
            "params": self.params,
            "params_after": self.params_after,
            "macs": self.macs,
            "macs_after": self.macs_after,
            "entries": [{key: _jsonable(value) for key, value in asdict(entry).items()} for entry in self.entries],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """Undo ``to_dict``."""
        if not isinstance(data, Mapping):
            raise ValueError(f"not a plan made by Plan.to_dict(): {reprlib.repr(data)}")
        if data.get("format") != FORMAT:
            raise ValueError(f"plan format must be {FORMAT}, got {data.get('format')!r}; make the plan anew")
        try:
            entries = tuple(_entry_from_dict(entry) for entry in data["entries"])
            fields = {key: data[key] for key in ("model", "budget", "params", "params_after", "macs", "macs_after")}
            _check_fields("plan", fields)
            return Plan(scheme=scheme_from_dict(data["scheme"]), entries=entries, **fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a plan made by Plan.to_dict(): {error}") from error

    def to_html(self) -> str:
        """Return one self-contained page that draws the plan."""
        return plan_page(self)

    def __str__(self) -> str:
        return plan_table(self)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(part) for key, part in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _read_json(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


def _entry_from_dict(data: Mapping[str, Any]) -> PlanEntry:
    fields = _read_json(data)
    if fields.get("tensor") is not None:
        fields["tensor"] = TensorEntry(**_read_json(fields["tensor"]))
        _check_fields(f"entry {reprlib.repr(fields.get('name'))}: tensor", asdict(fields["tensor"]))
    entry = PlanEntry(**fields)
    _check_fields(f"entry {reprlib.repr(entry.name)}", {key: getattr(entry, key) for key in fields})
    if entry.rank is not None and len(entry.shape) < 2:
        raise ValueError(f"entry {entry.name!r}: shape must be a list of at least two, got {list(entry.shape)}")
    return entry


def _check_fields(where: str, fields: Mapping[str, Any]) -> None:
    """Raise unless every value has the type of its field."""
    for key, value in fields.items():
        if key in _OPTIONAL and value is None:
            continue
        several = isinstance(value, tuple) and key in (*_LISTS, "rank")
        if key in _LISTS and not several:
            raise ValueError(f"{where}: {key} must be a list, got {reprlib.repr(value)}")
        for part in value if several else (value,):
            if key in _LEAST and (isinstance(part, bool) or not isinstance(part, int) or part < _LEAST[key]):
                expected = f"a whole number of at least {_LEAST[key]}"
                raise ValueError(f"{where}: {key} must be {expected}, got {reprlib.repr(part)}")
            if key in _TEXTS and not isinstance(part, str):
                raise ValueError(f"{where}: {key} must be text, got {reprlib.repr(part)}")
