"""What an optimizer's step is about to do, and acting just before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from factorized.decay.forms import Factor
from factorized.decay.strength import Number

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Step:
    """One step of an optimizer, as its groups say when it begins."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._group_of: dict[nn.Parameter, dict[str, Any]] = {
            parameter: group for group in optimizer.param_groups for parameter in group["params"]
        }
        # A fused optimizer unscales its gradients itself, after this, and is told by what here.
        self.scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        self._found_inf: Tensor | None = getattr(optimizer, "found_inf", None)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer has ``parameter`` to update."""
        return parameter in self._group_of

    def maximizes(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter goes along its gradient, so that what shrinks it has to be subtracted there."""
        return bool(self._group_of[parameter].get("maximize", False))

    def rate(self, parameter: nn.Parameter) -> Number:
        """Return the parameter's learning rate; zero where a fused optimizer will skip the step."""
        rate: Number | None = self._group_of[parameter].get("lr")
        if rate is None:
            raise ValueError(
                "a decoupled decay is scaled by the learning rate, and a group of the optimizer has no number as "
                "'lr'; use decoupled=False, or call apply_(lr=...) by hand"
            )
        # Of several devices it is the sum, so that a step to be skipped may have more than 1.
        return rate if self._found_inf is None else rate * (self._found_inf == 0)

    def for_gradient(self, parameter: nn.Parameter, number: Number) -> Number:
        """Return what to multiply by, in place of ``number``, what is added to the parameter's gradient."""
        number = number if self.scale is None else number * self.scale
        return -number if self.maximizes(parameter) else number

    def for_gradients(self, numbers: Mapping[Factor, Number]) -> dict[Factor, Number]:
        """Return the same for the factors that the optimizer has to update."""
        made: dict[tuple[Number, bool], Number] = {}  # equal numbers keep sharing one tensor, and so one launch
        result: dict[Factor, Number] = {}
        for factor, number in numbers.items():
            if self.holds(factor.parameter):
                key = number, self.maximizes(factor.parameter)
                if key not in made:
                    made[key] = self.for_gradient(factor.parameter, number)
                result[factor] = made[key]
        return result


def act_before_update(
    act: Callable[[], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    once: bool = False,
    penalty: Callable[[], Tensor] | None = None,
) -> Arguments | None:
    """Act now, or, where ``optimizer.step`` is given a closure, each time it has made the gradients anew.

    ``once`` acts after the first of these times only: what changes the parameters may not do so at every look that a
    line search takes. ``penalty`` is what ``act`` adds the gradient of: an optimizer that compares losses is given it
    with them. ``args`` and ``kwargs`` are those of a step pre-hook; returns what to call the step with instead, if
    anything.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    if closure is None:
        act()
        return None

    calls = 0

    def closure_then_act() -> Any:
        nonlocal calls
        loss = closure()
        calls += 1
        if penalty is not None and isinstance(args[0], LBFGS):
            loss = loss + penalty().detach()
        if calls == 1 or not once:
            act()
        return loss

    return (args[0], closure_then_act, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}
