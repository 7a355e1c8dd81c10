"""The plan: one entry per layer, with its rank or the reason why it stays dense."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any, ClassVar

from factorized._checks import is_whole
from factorized.formats.format import Format, Rank
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme
from factorized.nn.model import named
from factorized.planning.html import plan_fragment, plan_page
from factorized.planning.parts import Part
from factorized.planning.schemes import read_format, read_scheme
from factorized.planning.table import plan_table

FORMAT = 1
# What the fields of a plan must be when it is read from a file.
_LEAST = {"shape": 0, "groups": 1, "row_dims": 0, "head_ranks": 1} | dict.fromkeys(
    ("params", "params_after", "macs", "macs_after"), 0
)
_LISTS = ("shape", "aliases", "head_ranks", "forms")
_TEXTS = ("name", "type", "reason", "note", "aliases", "tied_to", "forms", "model", "budget")
_OPTIONAL = ("reason", "note", "tied_to", "macs", "macs_after")


@dataclass(frozen=True)
class PlanEntry:
    """One layer of a plan: what is needed to build its replacement, and what that saves.

    Attributes:
        name: the layer's dotted name in the model.
        type: the class of the dense layer, as in ``torch.nn``.
        shape: the shape of the dense weight.
        format: how the weight will be held; None if the layer stays dense.
        reason: why the layer stays dense; None if it is factorized.
        aliases: other names under which the model holds the same module.
        tied_to: the earlier entry whose factors this layer shares, or None.
        params: the parameters of the dense weight; 0 where an earlier entry holds it.
        params_after: those of the factors, or of the dense weight.
        macs: multiply-accumulates of the dense layer; None without ``example_input=``.
        macs_after: those of the factorized one.

    Examples:
        >>> plan = fz.plan(nn.Sequential(nn.Linear(64, 64)), rank=8, keep_first_and_last=False)
        >>> entry = plan.entries[0]
        >>> entry.name, entry.rank, entry.params, entry.params_after
        ('0', 8, 4096, 1024)
    """

    name: str
    type: str
    shape: tuple[int, ...]
    format: Format | None = None
    reason: str | None = None
    aliases: tuple[str, ...] = ()
    tied_to: str | None = None
    params: int = 0
    params_after: int = 0
    macs: int | None = None
    macs_after: int | None = None

    is_attention: ClassVar[bool] = False
    note: ClassVar[None] = None

    @property
    def rank(self) -> Rank | None:
        """The format's rank; None where the layer stays dense."""
        return None if self.format is None else self.format.rank

    @property
    def rank_text(self) -> str:
        """The rank as tables show it; all ranks of a tensor."""
        return "" if self.format is None else "x".join(map(str, self.format.ranks))


@dataclass(frozen=True)
class AttentionEntry:
    """One attention module of a plan, whose heads get fewer dimensions.

    Attributes:
        name: the module's dotted name in the model.
        type: its class.
        shape: the number of heads, and the size of one.
        head_ranks: the new sizes of a head in its Query-Key and Output-Value form.
        forms: which of these forms are shrunk, ``"qk"`` and ``"ov"``; empty if the module stays as it is.
        reason: why it stays as it is; None if it is shrunk.
        aliases: other names under which the model holds the same module.
        params: the parameters of the four projections and their biases.
        params_after: the same with the new sizes.
        macs: multiply-accumulates of the module; None without ``example_input=``.
        macs_after: the same with the new sizes.
        note: a caveat, such as a registration that could not be checked, or None.

    Examples:
        >>> model = nn.TransformerEncoderLayer(32, nhead=2, batch_first=True)
        >>> plan = fz.plan(model, rank_scale=0.5, include=["self_attn"], attention="heads")
        >>> plan.attention[0].name, plan.attention[0].shape, plan.attention[0].head_ranks
        ('self_attn', (2, 16), (8, 8))
    """

    name: str
    type: str
    shape: tuple[int, int]
    head_ranks: tuple[int, int]
    forms: tuple[str, ...] = ()
    reason: str | None = None
    aliases: tuple[str, ...] = ()
    params: int = 0
    params_after: int = 0
    macs: int | None = None
    macs_after: int | None = None
    note: str | None = None

    is_attention: ClassVar[bool] = True
    tied_to: ClassVar[None] = None  # attention with tied weights stays dense

    @property
    def rank(self) -> int | None:
        """The smaller size of a head; None where the module stays dense."""
        return min(self.head_ranks) if self.forms else None

    @property
    def rank_text(self) -> str:
        """The head size as tables show it; both sizes where the forms differ."""
        qk, ov = self.head_ranks
        return str(qk) if qk == ov else f"qk {qk}, ov {ov}"


Entry = PlanEntry | AttentionEntry


@dataclass(frozen=True)
class Plan:
    """Which layers of a model are factorized and at which ranks; ``print`` it, or pass it to ``fz.factorize``.

    Attributes:
        model: the class that the plan was made for.
        scheme: which formats the layers get.
        budget: as it was given, such as ``"ratio=0.1"``.
        entries: a ``PlanEntry`` for every layer, factorized or not, and an ``AttentionEntry`` for every attention
            module whose heads may be cut.
        params: the parameters of the whole model.
        params_after: the same after factorizing.
        macs: multiply-accumulates of the model on the example input; None without one.
        macs_after: the same after factorizing.
        parts: where the parameters are: embeddings, attention, other layers, everything else. They add up to those of
            the model.

    Examples:
        >>> plan = fz.plan(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), ratio=0.8)
        >>> print(plan)
        layer  type        shape  rank          params
        ...
        LowRank(), ratio=0.8: 1 of 3 layers factorized, 0.7949 of 12,480 parameters
        >>> fz.Plan.from_dict(plan.to_dict()) == plan  # to and from JSON
        True
    """

    model: str
    scheme: Scheme
    budget: str
    entries: tuple[Entry, ...]
    params: int
    params_after: int
    macs: int | None = None
    macs_after: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def ratio(self) -> float:
        """Parameters of the whole model after, over before."""
        return self.params_after / self.params

    @property
    def selected(self) -> tuple[Entry, ...]:
        """The layers to factorize and the attention modules to shrink."""
        return tuple(entry for entry in self.entries if entry.rank is not None)

    @property
    def layers(self) -> tuple[PlanEntry, ...]:
        """The layers to factorize."""
        return tuple(e for e in self.entries if isinstance(e, PlanEntry) and e.format is not None)

    @property
    def attention(self) -> tuple[AttentionEntry, ...]:
        """The attention modules to shrink."""
        return tuple(e for e in self.entries if isinstance(e, AttentionEntry) and e.forms)

    @property
    def skipped(self) -> tuple[Entry, ...]:
        """The layers that stay dense, each with its reason."""
        return tuple(entry for entry in self.entries if entry.rank is None)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready values."""
        return {
            "format": FORMAT,
            "model": self.model,
            "scheme": self.scheme.to_dict(),
            "budget": self.budget,
            "params": self.params,
            "params_after": self.params_after,
            "macs": self.macs,
            "macs_after": self.macs_after,
            "parts": [asdict(part) for part in self.parts],
            "entries": [_entry_to_dict(entry) for entry in self.entries],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """Undo ``to_dict``."""
        if not isinstance(data, Mapping):
            raise ValueError(f"not a plan made by Plan.to_dict(): {reprlib.repr(data)}")
        if data.get("format") != FORMAT:
            raise ValueError(f"plan format must be {FORMAT}, got {data.get('format')!r}; make the plan again")
        try:
            entries = tuple(_entry_from_dict(entry) for entry in data["entries"])
            fields = {key: data[key] for key in ("model", "budget", "params", "params_after", "macs", "macs_after")}
            _check_fields("plan", fields)
            for part in data["parts"]:
                _check_fields("part", part)
            parts = tuple(Part(**part) for part in data["parts"])
            return Plan(scheme=read_scheme(data["scheme"]), entries=entries, parts=parts, **fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a plan made by Plan.to_dict(): {error}") from error

    def to_html(self) -> str:
        """Return one self-contained page that draws the plan."""
        return plan_page(self)

    def _repr_html_(self) -> str:
        """Return the plan as notebooks show it."""
        return plan_fragment(self)

    def __str__(self) -> str:
        return plan_table(self)


def _entry_to_dict(entry: Entry) -> dict[str, Any]:
    values = {field.name: getattr(entry, field.name) for field in fields(entry)}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    if isinstance(entry, PlanEntry) and entry.format is not None:
        shape = entry.format.shape
        # a stack of matrices is read as one matrix, stacked by rows
        stacked = {} if shape.weight_shape == entry.shape else {"stacked": True}
        own = {"groups": shape.groups, "row_dims": shape.row_dims, **stacked}
        plain["format"] = {**own, **entry.format.to_dict()}
    return plain


def _entry_from_dict(data: Mapping[str, Any]) -> Entry:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    where = f"entry {reprlib.repr(values.get('name'))}"
    settings = values.pop("format", None)
    _check_fields(where, values)
    if "head_ranks" in values:
        for key in ("shape", "head_ranks"):
            if len(values[key]) != 2:
                raise ValueError(f"{where}: {key} must be a list of two, got {list(values[key])}")
        return AttentionEntry(**values)
    entry = PlanEntry(**values)
    if settings is None:
        return entry
    if len(entry.shape) < 2:
        raise ValueError(f"{where}: shape must be a list of at least two, got {list(entry.shape)}")
    with named(where):
        return replace(entry, format=_read_format(entry.shape, dict(settings)))


def _read_format(weight_shape: tuple[int, ...], settings: dict[str, Any]) -> Format:
    own = {key: settings.pop(key) for key in ("groups", "row_dims")}
    _check_fields("format", own)
    if settings.pop("stacked", False):
        weight_shape = (prod(weight_shape[:-1]), weight_shape[-1])
    outputs, inputs, *size = weight_shape
    if own["row_dims"] > len(size):
        raise ValueError(f"format: row_dims must be in 0..{len(size)}, got {own['row_dims']}")
    return read_format(KernelShape(outputs, inputs * own["groups"], tuple(size), **own), settings)


def _check_fields(where: str, fields: Mapping[str, Any]) -> None:
    """Raise unless every value has the type of its field."""
    for key, value in fields.items():
        if key in _OPTIONAL and value is None:
            continue
        several = isinstance(value, tuple) and key in _LISTS
        if key in _LISTS and not several:
            raise ValueError(f"{where}: {key} must be a list, got {reprlib.repr(value)}")
        for part in value if several else (value,):
            if key in _LEAST and not is_whole(part, _LEAST[key]):
                expected = f"a whole number of at least {_LEAST[key]}"
                raise ValueError(f"{where}: {key} must be {expected}, got {reprlib.repr(part)}")
            if key in _TEXTS and not isinstance(part, str):
                raise ValueError(f"{where}: {key} must be text, got {reprlib.repr(part)}")
