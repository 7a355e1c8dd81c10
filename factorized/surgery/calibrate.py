"""Filling the factors of a model from data: ``init=fz.Calibrated(batches)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from factorized._checks import warn
from factorized._torch import full_precision
from factorized.formats.calibration import by_output
from factorized.nn.dense import dense_weight
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import listed, named
from factorized.planning.calibration import NEVER_CALLED, Calibrated, Collected, collect
from factorized.planning.plan import Plan
from factorized.planning.sequential import collect_in_order
from factorized.surgery.decompose import decompose_all, refuse_not_finite
from factorized.surgery.progress import Count


class Seen(NamedTuple):
    """How many inputs a layer had, and how many it needs: ``InputMoments`` without the moments."""

    samples: int
    directions: int


@torch.no_grad()
def calibrate_all(
    model: nn.Module,
    calibration: Calibrated,
    plan: Plan,
    dense: Mapping[str, nn.Module],
    layers: Mapping[str, FactorizedLayer],
    count: Count,
    *,
    exact: bool = False,
) -> None:
    """Fill the factors of every layer that is not tied to another, and adjust biases.

    The outputs of a layer with a bias keep their mean, so that its factors need to keep only what varies.
    """
    weights = {entry.name: dense_weight(dense[entry.name]) for entry in plan.layers}
    _refuse_meta(weights)
    refuse_not_finite(weights)
    sharing: dict[str, dict[str, nn.Module]] = {}
    for entry in plan.layers:
        sharing.setdefault(entry.tied_to or entry.name, {})[entry.name] = dense[entry.name]
    never_ran: dict[str, FactorizedLayer] = {}
    short: dict[str, Seen] = {}
    if calibration.sequential:
        found = collect_in_order(model, calibration, sharing, layers)
    else:
        found = collect(model, calibration, sharing)
    for leader, collected in found:
        if not collected.ran:
            never_ran[leader] = layers[leader]
            continue
        seen = [Seen(one.samples, one.directions) for one in collected.ran.values()]
        least = min(seen, key=lambda one: one.samples - one.directions)
        short |= {leader: least} if least.samples < least.directions else {}
        with named(leader):
            _fill(layers, leader, weights[leader], collected)
        count.add(1)
    rest = {name: weights[name] for name in never_ran}
    for name, cores in decompose_all(rest, never_ran, count, exact=exact).items():
        layers[name].set_factors(*cores)
    _warn(short, list(never_ran))


@full_precision
def _fill(layers: Mapping[str, FactorizedLayer], leader: str, weight: Tensor, collected: Collected) -> None:
    """Set the factors of one layer from its weight, and the biases of the layers that share it and ran."""
    format = layers[leader].format
    weight, moments = weight.reshape(format.shape.weight_shape), collected.moments
    target = collected.target(weight, moments, format.shape)
    layers[leader].set_factors(*format.calibrate(target, moments))
    product = format.compose([factor.double() for factor in layers[leader].factors])
    for name, one in collected.ran.items():
        bias = layers[name].bias
        if one.centered and bias is not None:
            before, after = (by_output(W, format.shape, one.transposed) for W in (weight.double(), product))
            bias.add_((before @ one.dense_mean.unsqueeze(-1) - after @ one.mean.unsqueeze(-1)).flatten())


def _refuse_meta(weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        if weight.is_meta:
            raise ValueError(
                f"{name or 'the model'}: weight is on the meta device, without values, and init=Calibrated runs the "
                "model; load the weights first, or use another init. Nothing was changed"
            )


def _warn(short: Mapping[str, Seen], never_ran: Sequence[str]) -> None:
    if short:
        worst = max(short.values(), key=lambda one: one.directions / one.samples)
        warn(
            f"init=Calibrated: fewer samples than directions in the inputs of {listed(list(short))}: "
            f"{worst.samples:,} where at least {worst.directions:,} are needed. Directions that no sample has are kept "
            f"by the size of their weights; give {-(-worst.directions // worst.samples)} times as many samples",
        )
    if never_ran:
        warn(
            f"init=Calibrated: no batch reaches {listed(never_ran)} ({NEVER_CALLED}), so spectral initialization is "
            "used there",
        )
