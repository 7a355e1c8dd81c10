"""Base class of decays that hook into an optimizer's step, and the settings of that step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from factorized._torch import not_compiled
from factorized.decay.forms import Factor, Form
from factorized.decay.guard import (
    DecaysProducts,
    LaterLayers,
    check_attachable,
    check_decayed_once,
    check_still_held,
    only_makes_state,
)
from factorized.decay.strength import Number, scalar, unless_named

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Step:
    """The settings of one optimizer step, read from its groups when it begins."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._group_of: dict[nn.Parameter, dict[str, Any]] = {
            parameter: group for group in optimizer.param_groups for parameter in group["params"]
        }
        # Set if a fused optimizer unscales its gradients itself, after the decay has been added.
        self.scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        self._found: Tensor | None = None
        self._asked = False
        self._rates: dict[Number, Number] = {}  # as they act; equal ones share a tensor

    @property
    def _found_inf(self) -> Tensor | None:
        """Whether the optimizer will skip the step, if it says so beforehand: a fused one that unscales, and LAMB.

        LAMB computes it, so it is asked once, and only if needed. (torch cannot compile a ``cached_property``.)
        """
        if not self._asked:
            self._asked, self._found = True, getattr(self.optimizer, "found_inf", None)
        return self._found

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer updates ``parameter``."""
        return parameter in self._group_of

    def is_skipped(self) -> bool:
        """Return whether the optimizer will skip the step; this waits for its device."""
        return self._found_inf is not None and bool(self._found_inf != 0)

    def maximizes(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer ascends the gradient, so that a decay has to be subtracted from it."""
        return bool(self._group_of[parameter].get("maximize", False))

    def rate(self, parameter: nn.Parameter) -> Number:
        """Return the parameter's learning rate; zero if the optimizer will skip the step."""
        rate: Number | None = self._group_of[parameter].get("lr")
        if rate is None:
            raise ValueError(
                "a decoupled decay is scaled by the learning rate, but a group of the optimizer has no "
                "'lr'; use decoupled=False, or call apply_(lr=...) by hand"
            )
        if rate not in self._rates:
            number, found = scalar(rate), self._found_inf
            # found_inf is a sum over devices, so it may be more than 1.
            self._rates[rate] = number if found is None else number * (found == 0)
        return self._rates[rate]

    def for_gradient(self, parameter: nn.Parameter, number: Number) -> Number:
        """Return ``number`` with the sign and the scale of the parameter's gradient."""
        number = number if self.scale is None else number * self.scale
        return -number if self.maximizes(parameter) else number

    def for_gradients(self, numbers: Mapping[Factor, Number]) -> dict[Factor, Number]:
        """Return ``for_gradient`` of the factors that the optimizer updates."""
        made: dict[tuple[Number, bool], Number] = {}  # equal numbers share one tensor, and so one launch
        result: dict[Factor, Number] = {}
        for factor, number in numbers.items():
            if self.holds(factor.parameter):
                key = number, self.maximizes(factor.parameter)
                if key not in made:
                    made[key] = self.for_gradient(factor.parameter, number)
                result[factor] = made[key]
        return result


class AttachedDecay(DecaysProducts):
    """Acts on products just before every step of the optimizer it is attached to. Abstract."""

    noun: ClassVar[str]  # what errors call it
    shown: ClassVar[tuple[str, ...]]  # the attributes that the repr shows
    changes_parameters: bool = False  # rather than gradients
    forms: list[Form]  # of the model

    def __init__(self, model: nn.Module, decayed: Sequence[Form]) -> None:
        self.steps = 0  # taken so far: the argument of a schedule
        self._decayed = list(decayed)
        self._later = LaterLayers(model)
        self._handle: RemovableHandle | None = None
        self._decays_seen: list[tuple[object, int]] = []  # weight_decay and size of the optimizer's groups

    @property
    def products(self) -> Sequence[Form]:
        """The forms that count as products: those that are decayed."""
        return self._decayed

    @abstractmethod
    def penalty(self) -> Tensor:
        """Return the number whose gradient is added, differentiable."""

    @abstractmethod
    def _act(self, step: Step) -> None:
        """Act just before ``step`` is taken."""

    def _refresh(self, *, stepping: bool = False) -> None:
        """Take over settings that were changed in place, and check that the model still holds the factors."""
        if not torch.compiler.is_compiling():
            check_still_held(self._decayed, between_passes=not stepping)
            self._later.check(self.forms, self._acts_on)

    def _acts_on(self, found: Sequence[Form]) -> Sequence[Form]:
        """Return those of the forms that it acts on if the model has them when it is made."""
        return unless_named(found)

    def _counts(self, step: Step) -> bool:
        """Return whether ``step`` counts as one more step."""
        return True

    def attach(self, optimizer: Optimizer) -> Self:
        """Act just before every ``optimizer.step()``, after clipping and unscaling; return this object.

        Copies of torch's optimizers drop such attachments: attach a decay of the copied model to them.
        """
        optimizer = inner_optimizer(optimizer)
        if self._handle is not None:
            raise ValueError(f"this {self.noun} is attached already; call detach() first")
        check_attachable(self, self._decayed, optimizer)
        self._later.check(self.forms, self._acts_on)
        self._decays_seen = _own_decays(optimizer)
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        return self

    def detach(self) -> None:
        """Stop acting on the optimizer."""
        if self._handle is None:
            raise ValueError(f"this {self.noun} is not attached to an optimizer; call attach(optimizer) first")
        self._handle.remove()
        self._handle = None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` is a factor that this object acts on."""
        return any(factor.parameter is parameter for form in self._decayed for factor in form.factors)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_in_short(getattr(self, name))}" for name in self.shown)
        return f"{type(self).__name__}(products={len(self._decayed)}, {shown})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, which are not attached to an optimizer."""
        return {**self.__dict__, "_handle": None}

    @not_compiled  # a compiled step would not see that a parameter of the optimizer is frozen, or trained again
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Act now or, if ``optimizer.step`` is given a closure, after each of its calls.

        A decay that changes parameters acts after the first call only, not at every point of a line search. An
        optimizer that compares losses gets the penalty added to them. Returns new arguments for the step, if any.
        """
        self._refresh(stepping=True)
        if self._decays_seen != _own_decays(optimizer):  # groups got parameters, or a schedule changed their decay
            check_decayed_once(self, self._decayed, optimizer)
            self._decays_seen = _own_decays(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        begun, acted = self.steps, False
        if closure is None:
            if only_makes_state(optimizer):
                return None
            step = Step(optimizer)
            self._act(step)
            self.steps = begun + self._counts(step)
            return None

        def closure_then_act() -> Any:
            nonlocal acted
            loss = closure()
            self.steps = begun  # several calls of the closure are one step
            if isinstance(optimizer, LBFGS) and not self.changes_parameters:
                loss = loss + self.penalty().detach()
            step = Step(optimizer)
            if not (acted and self.changes_parameters):
                self._act(step)
            self.steps, acted = begun + self._counts(step), True
            return loss

        return (args[0], closure_then_act, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that changes the parameters, inside any wrappers.

    Accelerate's wrapper does not run hooks. SAM perturbs parameters and restores them before its inner step, and may
    be stepped by other methods than ``step``.
    """
    for name in ("optimizer", "base_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer):
            return inner_optimizer(inner)
    return optimizer


def _in_short(value: object) -> str:
    """Return the name of a function, and the repr of other values."""
    return getattr(value, "__name__", type(value).__name__) if callable(value) else repr(value)


def _own_decays(optimizer: Optimizer) -> list[tuple[object, int]]:
    """Return the weight decay of an optimizer's groups, and how many parameters it acts on."""
    return [(group.get("weight_decay"), len(group["params"])) for group in optimizer.param_groups]
