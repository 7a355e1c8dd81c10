"""Ordinary decay of what shares a parameter with factors, such as the queries and keys of a packed attention weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adafactor, Adagrad, Adamax, Muon, Optimizer, RMSprop

from factorized.decay.forms import Factor, Form
from factorized.decay.hook import Step

# The key of the strength in the group that fz.parameter_groups makes of packed weights. Its weight_decay is zero,
# because an optimizer decays whole parameters, and a part of these is decayed as a product.
REST_DECAY = "rest_decay"
# Torch's optimizers that add their decay to the gradient, and those that subtract it from the parameters. The Adam
# family says in its groups which it does.
_COUPLED = (SGD, Adadelta, Adagrad, Adamax, ASGD, RMSprop)
_DECOUPLED = (Adafactor, Muon)


def packed_parameters(decayed: Sequence[Form]) -> set[nn.Parameter]:
    """Return the parameters of which only a part is a factor of these forms."""
    covered: dict[nn.Parameter, dict[tuple[int, int], int]] = {}
    for form in decayed:
        for factor in form.factors:
            part = factor.projection
            if part is not None:
                covered.setdefault(factor.parameter, {})[part.dim, part.start] = part.size
    return {p for p, parts in covered.items() if sum(parts.values()) < p.shape[next(iter(parts))[0]]}


@torch.no_grad()
def decay_rest(step: Step, factors: Iterable[Factor], *, decoupled: bool) -> None:
    """Decay what shares a parameter with ``factors`` as the optimizer would have, by the number in its group.

    ``decoupled`` says how the decay of the factors acts: the rest follows it where the optimizer is none of torch's.
    """
    held: dict[nn.Parameter, list[Factor]] = {}
    for factor in factors:
        held.setdefault(factor.parameter, []).append(factor)
    for group in step.optimizer.param_groups:
        number = group.get(REST_DECAY, 0.0)
        for parameter in group["params"] if number else ():
            if parameter not in held or not parameter.requires_grad or parameter.grad is None:
                continue
            rest = _rest_of(parameter, held[parameter])
            if _is_decoupled(step.optimizer, group, otherwise=decoupled):
                parameter.detach().sub_(rest * (number * step.rate(parameter)))
            else:
                parameter.grad.add_(rest * step.for_gradient(parameter, number))


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any], otherwise: bool) -> bool:
    """Return whether ``optimizer`` takes its decay off the parameters, as AdamW does, or adds it to the gradients."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    return isinstance(optimizer, _DECOUPLED) or (otherwise and not isinstance(optimizer, _COUPLED))


def _rest_of(parameter: nn.Parameter, factors: Iterable[Factor]) -> Tensor:
    """Return a copy of ``parameter`` with zeros where its ``factors`` are."""
    rest = parameter.detach().clone()
    for factor in factors:
        factor.part(rest).zero_()
    return rest
