"""Steps of many tensors in few passes over their memory: Adam's directions ``m̂ / (√v̂ + ε)``, and taking a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from factorized._torch import not_compiled

SMALL = 2**14  # entries of a tensor, below which a launch costs more than a copy


@not_compiled  # torch cannot
def add_directions_(
    updates: Sequence[Tensor],  # of one device and type; the others have the same shapes and strides
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],  # moments m
    second: Sequence[Tensor],  # moments v
    steps: Sequence[Tensor],  # of each, this one included, for the correction by 1 - βᵗ; inf corrects nothing
    betas: tuple[float, float],
    eps: float,
    passed: Tensor | None = None,  # (), 1 or 0; with 0 nothing is changed
) -> None:
    """Take gradients into the moments, and add the directions to ``updates``.

    This is torch's fused Adam on ``updates`` as its parameters, at the learning rate -1: it reads and writes everything
    once, where separate operations on all tensors pass over memory 27 times.
    """
    torch._fused_adam_(
        list(updates),
        list(gradients),
        list(first),
        list(second),
        [],
        list(steps),
        lr=-1.0,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=None if passed is None else 1 - passed,
    )


def subtract_scaled_(
    weights: Sequence[Tensor],  # of one device and type; those of one shape next to each other
    updates: Sequence[Tensor],
    scales: Tensor,  # (weights,)
) -> None:
    """Subtract each update times its scale from its weight.

    The scales stay on the device, so this takes a launch for each large tensor; small ones of one shape go together.
    """
    alone: list[int] = []
    for shape, run in groupby(range(len(weights)), key=lambda place: weights[place].shape):
        places = list(run)
        if len(places) == 1 or shape.numel() > SMALL:
            alone += places
            continue
        some = slice(places[0], places[-1] + 1)
        steps = torch.stack(list(updates[some])).mul_(scales[some].view(-1, *[1] * len(shape)))
        torch._foreach_sub_(list(weights[some]), list(steps.unbind()))
    if alone:
        numbers = scales.unbind()
        torch._foreach_addcmul_(
            [weights[place] for place in alone],
            [updates[place] for place in alone],
            [numbers[place] for place in alone],
            value=-1.0,
        )


def laid_out_like(like: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` with the strides of ``like``: itself, or a copy."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)
