"""Ordinary decay of what shares a parameter with factors, such as the queries and keys of a packed attention weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from factorized.decay.forms import AnyForm, Factor

# The key that fz.parameter_groups puts into the group of packed weights, whose own weight_decay is zero: an optimizer
# decays whole parameters, and of these a part is decayed as a product.
REST_DECAY = "rest_decay"


def packed_parameters(decayed: Sequence[AnyForm]) -> set[nn.Parameter]:
    """Return the parameters of which only a part is a factor of these forms."""
    covered: dict[nn.Parameter, dict[tuple[int, int], int]] = {}
    for form in decayed:
        for factor in form.factors:
            part = factor.projection
            if part is not None:
                covered.setdefault(factor.parameter, {})[part.dim, part.start] = part.size
    return {p for p, parts in covered.items() if sum(parts.values()) < p.shape[next(iter(parts))[0]]}


def rest_rates(groups: Sequence[Mapping[str, Any]], decayed: Iterable[Factor]) -> dict[nn.Parameter, float]:
    """Return the ordinary decay of the rest of every packed parameter of an optimizer's groups."""
    held = {factor.parameter for factor in decayed}
    return {
        parameter: group[REST_DECAY]
        for group in groups
        for parameter in group["params"]
        if group.get(REST_DECAY) and parameter in held
    }


@torch.no_grad()
def rest_of(parameter: nn.Parameter, factors: Iterable[Factor]) -> Tensor:
    """Return a copy of ``parameter`` with zeros where its factors are."""
    rest = parameter.detach().clone()
    for factor in factors:
        if factor.parameter is parameter:
            factor.part(rest).zero_()
    return rest
