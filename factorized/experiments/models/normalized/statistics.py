"""Mean and variance of a batch per channel, and normalizing by them, on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from factorized.experiments.models.normalized import launches, tiles
from factorized.formats.launches import Launch, builder, run_all


class Parts(NamedTuple):
    """Means and sums of squared distances from them, of as many positions each; the last one may have fewer."""

    parts: Tensor  # (parts, 2, channels)
    each: int  # positions


class Statistics(NamedTuple):
    """The statistics of a batch, and the scale and shift of a norm that follow from them."""

    statistics: Tensor  # (2, channels): mean and variance
    coefficients: Tensor  # (2, channels): scale and shift


def measured(
    x: Tensor,  # (batch, channels, height, width), channels-last
) -> Parts:
    """Return the parts of the statistics of a tensor."""
    return Parts(_measure(x.detach()), tiles.TILES.stream(x).span)


def followed(norm: nn.BatchNorm2d, known: Parts, positions: int) -> Statistics:
    """Return the statistics that a norm in training divides by; its running ones follow them."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.momentum is not None
    scale, shift, running = norm.weight.detach(), norm.bias.detach(), (norm.running_mean, norm.running_var)
    found = _join(*known, positions, scale, shift, *running, norm.momentum, norm.eps)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    return Statistics(*found)


@torch.library.custom_op("factorized::measure_batch", mutates_args=(), schema="(Tensor x) -> Tensor")
def _measure(x: Tensor) -> Tensor:
    parts = _empty_parts(x)
    run_all(_measuring(x, parts), x.device)
    return parts


@_measure.register_fake
def _traced_parts(x: Tensor) -> Tensor:
    parts = _empty_parts(x)
    if x.is_cuda:
        builder.ask(_measuring, x.device, x, parts)
    return parts


def _empty_parts(x: Tensor) -> Tensor:
    return x.new_empty((tiles.TILES.stream(x).splits, 2, x.shape[1]), dtype=torch.float32)


def _measuring(x: Tensor, parts: Tensor) -> list[Launch]:
    return [launches.measuring(x, parts)]


@torch.library.custom_op(
    "factorized::join_statistics",
    mutates_args=("running_mean", "running_var"),
    schema="(Tensor parts, int each, int positions, Tensor gamma, Tensor beta, Tensor(a!) running_mean, "
    "Tensor(b!) running_var, float momentum, float epsilon) -> (Tensor, Tensor)",
)
def _join(parts: Tensor, each: int, positions: int, gamma: Tensor, *given: Any) -> Any:
    results = _empty_statistics(parts)
    run_all(_joining(*results, parts, each, positions, gamma, *given), parts.device)
    return results


@_join.register_fake
def _traced_statistics(parts: Tensor, *given: Any) -> Any:
    results = _empty_statistics(parts)
    if parts.is_cuda:
        builder.ask(_joining, parts.device, *results, parts, *given)
    return results


def _empty_statistics(parts: Tensor) -> tuple[Tensor, Tensor]:
    return parts.new_empty(parts.shape[1:]), parts.new_empty(parts.shape[1:])


def _joining(
    statistics: Tensor,  # written
    coefficients: Tensor,  # written
    parts: Tensor,
    each: int,
    positions: int,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    epsilon: float,
) -> list[Launch]:
    norm, running = (gamma, beta, epsilon), (running_mean, running_var, momentum)
    return [launches.joining((parts, each), positions, norm, running, (statistics, coefficients))]
