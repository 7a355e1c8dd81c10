"""Base class of decays that hook into an optimizer's step, and the settings of that step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from factorized.decay.forms import Factor, Form
from factorized.decay.guard import DecaysProducts, check_attachable, check_decayed_once, check_still_held
from factorized.decay.strength import Number

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Step:
    """The settings of one optimizer step, read from its groups when it begins."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._group_of: dict[nn.Parameter, dict[str, Any]] = {
            parameter: group for group in optimizer.param_groups for parameter in group["params"]
        }
        # Set where a fused optimizer unscales its gradients itself, which happens after the decay has been added.
        self.scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        self._found_inf: Tensor | None = getattr(optimizer, "found_inf", None)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer has ``parameter`` to update."""
        return parameter in self._group_of

    def maximizes(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer ascends the gradient, so that a decay has to be subtracted from it."""
        return bool(self._group_of[parameter].get("maximize", False))

    def rate(self, parameter: nn.Parameter) -> Number:
        """Return the parameter's learning rate; zero where a fused optimizer will skip the step."""
        rate: Number | None = self._group_of[parameter].get("lr")
        if rate is None:
            raise ValueError(
                "a decoupled decay is scaled by the learning rate, and a group of the optimizer has no number as "
                "'lr'; use decoupled=False, or call apply_(lr=...) by hand"
            )
        # found_inf is a sum over devices, so it may be more than 1.
        return rate if self._found_inf is None else rate * (self._found_inf == 0)

    def for_gradient(self, parameter: nn.Parameter, number: Number) -> Number:
        """Return ``number`` with the sign and the scale of the parameter's gradient."""
        number = number if self.scale is None else number * self.scale
        return -number if self.maximizes(parameter) else number

    def for_gradients(self, numbers: Mapping[Factor, Number]) -> dict[Factor, Number]:
        """Return ``for_gradient`` of the factors that the optimizer updates."""
        made: dict[tuple[Number, bool], Number] = {}  # equal numbers keep sharing one tensor, and so one launch
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
    changes_parameters: bool = False  # rather than gradients

    def __init__(self, decayed: Sequence[Form]) -> None:
        self.steps = 0  # taken so far: what a schedule is asked with
        self._decayed = list(decayed)
        self._handle: RemovableHandle | None = None
        self._decays_seen: list[object] = []  # by the optimizer's groups

    @abstractmethod
    def penalty(self) -> Tensor:
        """Return the number whose gradient is added, differentiable."""

    @abstractmethod
    def _act(self, step: Step) -> None:
        """Act, given the step that is about to be taken."""

    def attach(self, optimizer: Optimizer) -> Self:
        """Act just before every ``optimizer.step()``, after clipping and unscaling; return this object.

        Torch's optimizers leave such attachments out of their copies: attach a decay of the copied model to those.
        """
        optimizer = inner_optimizer(optimizer)
        if self._handle is not None:
            raise ValueError(f"this {self.noun} is attached already; call detach() first")
        check_attachable(self, self._decayed, optimizer)
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
        """Return whether ``parameter`` is a factor that this acts on."""
        return any(factor.parameter is parameter for form in self._decayed for factor in form.factors)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, which are attached to no optimizer."""
        return {**self.__dict__, "_handle": None}

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Act now, or, where ``optimizer.step`` is given a closure, after each of its calls.

        A decay that changes parameters acts after the first call only, not at every point of a line search. An
        optimizer that compares losses gets them with the penalty. Returns new arguments for the step, if any.
        """
        if not torch.compiler.is_compiling():
            check_still_held(self._decayed)
        if self._decays_seen != _own_decays(optimizer):  # a group was added, or a schedule moves its decay
            check_decayed_once(self._decayed, optimizer)
            self._decays_seen = _own_decays(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        begun, acted = self.steps, False
        if closure is None:
            self._act(Step(optimizer))
            self.steps = begun + 1
            return None

        def closure_then_act() -> Any:
            nonlocal acted
            loss = closure()
            self.steps = begun  # several calls of the closure are one step
            if isinstance(optimizer, LBFGS) and not self.changes_parameters:
                loss = loss + self.penalty().detach()
            if not (acted and self.changes_parameters):
                self._act(Step(optimizer))
            self.steps, acted = begun + 1, True
            return loss

        return (args[0], closure_then_act, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside those that accelerate wraps around one: they run no hooks of their own."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _own_decays(optimizer: Optimizer) -> list[object]:
    """Return the decay that an optimizer itself has, by group."""
    return [group.get("weight_decay") for group in optimizer.param_groups]
