"""Base class of decays that hook into an optimizer's step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from factorized.decay.forms import AnyForm
from factorized.decay.guard import DecaysProducts, check_attachable, check_decayed_once, check_still_held
from factorized.decay.step import Arguments


class AttachedDecay(DecaysProducts):
    """Acts on products just before every step of the optimizer it is attached to. Abstract."""

    noun: ClassVar[str]  # what errors call it

    def __init__(self, decayed: Sequence[AnyForm]) -> None:
        self._decayed = list(decayed)
        self._handle: RemovableHandle | None = None
        self._decays_seen: list[object] = []  # by the optimizer's groups

    def attach(self, optimizer: Optimizer) -> Self:
        """Act just before every ``optimizer.step()``, after clipping and unscaling; return this object.

        Torch's optimizers leave such attachments out of their copies: attach a decay of the copied model to those.
        """
        if self._handle is not None:
            raise ValueError(f"this {self.noun} is attached already; call detach() first")
        check_attachable(self, self._decayed, optimizer)
        self._decays_seen = _own_decays(optimizer)
        self._handle = optimizer.register_step_pre_hook(self._checked_before_step)
        return self

    def detach(self) -> None:
        """Stop acting on the optimizer."""
        if self._handle is None:
            raise ValueError(f"this {self.noun} is not attached to an optimizer; call attach(optimizer) first")
        self._handle.remove()
        self._handle = None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` is a factor that this acts on."""
        return any(factor.parameter is parameter for form in self._decayed for factor in form.factors)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles carry: they are attached to no optimizer."""
        return {**self.__dict__, "_handle": None}

    def _checked_before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if not torch.compiler.is_compiling():
            check_still_held(self._decayed)
        if self._decays_seen != _own_decays(optimizer):  # a group was added, or a schedule moves its decay
            check_decayed_once(self._decayed, optimizer)
            self._decays_seen = _own_decays(optimizer)
        return self._before_step(optimizer, args, kwargs)

    @abstractmethod
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Act; return what to call the step with instead, if anything."""


def _own_decays(optimizer: Optimizer) -> list[object]:
    """Return the decay that an optimizer itself has, by group."""
    return [group.get("weight_decay") for group in optimizer.param_groups]
