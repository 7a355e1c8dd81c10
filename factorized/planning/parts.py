"""Where the parameters of a model are: each is in one entry of a plan, or in the last part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from factorized.nn.model import is_inside

if TYPE_CHECKING:
    from factorized.planning.plan import Entry, Plan

REST = "everything else"  # norms, and biases of layers
PARTS = ("embeddings", "attention", "other layers", REST)


@dataclass(frozen=True)
class Part:
    """One part of a model: its parameters before and after."""

    name: str
    params: int
    params_after: int


def parts_of(plan: Plan, attention: Collection[str]) -> tuple[Part, ...]:
    """Return the four parts of a planned model; their counts add up to the model's.

    ``attention`` are the dotted names of its attention modules, whose layers belong to that part.
    """
    before, after = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for entry in plan.entries:
        part = _part_of(entry, attention)
        before[part] += entry.params
        after[part] += entry.params_after
    before[REST] = plan.params - sum(before.values())
    after[REST] = plan.params_after - sum(after.values())
    return tuple(Part(name, before[name], after[name]) for name in PARTS)


def shown_parts(parts: Sequence[Part]) -> list[Part]:
    """Return the parts that hold parameters, if some are embeddings or attention; the table shows layers one by one."""
    held = [part for part in parts if part.params]
    return held if any(part.name in ("embeddings", "attention") for part in held) else []


def _part_of(entry: Entry, attention: Collection[str]) -> str:
    if entry.is_attention or any(entry.name == outer or is_inside(entry.name, outer) for outer in attention):
        return "attention"
    return "embeddings" if "Embedding" in entry.type else "other layers"
