"""Ordinary decay of the rest of a parameter that holds factors, such as queries in a packed attention weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adafactor, Adagrad, Adamax, Muon, Optimizer, RMSprop

from factorized.decay.forms import Factor, Form
from factorized.decay.guard import DecaysProducts
from factorized.decay.hook import Step

# The key of the strength in the group that fz.parameter_groups makes for packed weights. Its weight_decay is zero,
# because an optimizer decays whole parameters, while a part of these is decayed as a product.
REST_DECAY = "rest_decay"
# Torch's optimizers that add their decay to the gradient, and those that subtract it from the parameters. The Adam
# family stores this in its groups.
_COUPLED = (SGD, Adadelta, Adagrad, Adamax, ASGD, RMSprop)
_DECOUPLED = (Adafactor, Muon)


def packed_parameters(products: Sequence[Form]) -> dict[nn.Parameter, list[Factor]]:
    """Return the parameters of which only a part belongs to these forms, with the factors in that part."""
    held: dict[nn.Parameter, list[Factor]] = {}
    covered: dict[nn.Parameter, dict[tuple[int, int], int]] = {}
    for form in products:
        for factor in form.factors:
            part = factor.projection
            if part is not None:
                held.setdefault(factor.parameter, []).append(factor)
                covered.setdefault(factor.parameter, {})[part.dim, part.start] = part.size
    return {p: held[p] for p, parts in covered.items() if sum(parts.values()) < p.shape[next(iter(parts))[0]]}


@torch.no_grad()
def decay_rest(step: Step, decay: DecaysProducts, *, decoupled: bool) -> None:
    """Decay what is no product in packed parameters, as the optimizer would have, by the number in their group.

    If several decays act on one optimizer, the first that knows products of a parameter does this. ``decoupled`` is how
    ``decay`` acts; the rest follows it if the optimizer is not one of torch's.
    """
    for group in step.optimizer.param_groups:
        number = group.get(REST_DECAY, 0.0)
        for parameter in group["params"] if number else ():
            if not parameter.requires_grad or parameter.grad is None:
                continue
            first, factors = _first_decay(step.optimizer, parameter)
            if first is not decay:
                continue
            rest = without_factors(parameter, factors)
            if _is_decoupled(step.optimizer, group, otherwise=decoupled):
                parameter.detach().sub_(rest * (number * step.rate(parameter)))
            else:
                parameter.grad.add_(rest * step.for_gradient(parameter, number))


def _first_decay(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[DecaysProducts | None, list[Factor]]:
    """Return the first that knows products of a parameter, the optimizer or what is attached, and their factors."""
    attached = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    for decay in (optimizer, *attached):
        if isinstance(decay, DecaysProducts):
            held = [factor for form in decay.products for factor in form.factors if factor.parameter is parameter]
            if held:
                return decay, held
    return None, []


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any], otherwise: bool) -> bool:
    """Return whether ``optimizer`` subtracts its decay from the parameters, as AdamW does, or adds it to gradients."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    return isinstance(optimizer, _DECOUPLED) or (otherwise and not isinstance(optimizer, _COUPLED))


def without_factors(parameter: nn.Parameter, factors: Iterable[Factor]) -> Tensor:
    """Return a copy of ``parameter`` with zeros where its ``factors`` are."""
    rest = parameter.detach().clone()
    for factor in factors:
        factor.part(rest).zero_()
    return rest
