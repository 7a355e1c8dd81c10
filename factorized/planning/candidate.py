"""The modules of a model that a plan lists: layers, attention modules whose heads are cut, and what is neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from factorized.attention.unit import AttentionUnit, FormName
from factorized.formats.kernel import KernelShape


@dataclass(kw_only=True)
class Candidate:
    """A module with weight matrices, and why it stays as it is; with none, it is of one of the two classes below."""

    name: str
    module: nn.Module
    aliases: tuple[str, ...] = ()  # other names of the same module
    reason: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every dotted name under which the model holds this module."""
        return (self.name, *self.aliases)


@dataclass(kw_only=True)
class LayerCandidate(Candidate):
    """A layer that can be factorized."""

    shape: KernelShape
    tied_to: str | None = None  # the first layer that holds the same weight, when both are factorized together


@dataclass(kw_only=True)
class AttentionCandidate(Candidate):
    """An attention module that can be read, taken as a whole."""

    unit: AttentionUnit
    forms: tuple[FormName, ...] = ()  # those to shrink
    note: str | None = None  # what is not certain about it

    tied_to: ClassVar[None] = None  # attention with tied weights stays dense


Selected = LayerCandidate | AttentionCandidate  # what a budget is spent on
