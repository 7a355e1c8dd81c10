"""Spectra of weights, or of their outputs on data, for budgets that are spent by spectrum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from factorized._checks import warn
from factorized._torch import all_finite
from factorized.attention.cost import attention_spectrum
from factorized.formats.calibration import Moment, output_error, output_spectrum
from factorized.formats.kernel import to_matrix
from factorized.formats.svd import squared_singular_values
from factorized.nn.dense import dense_weight
from factorized.nn.model import listed, named
from factorized.planning.assemble import Tied
from factorized.planning.calibration import NEVER_CALLED, Calibrated, collect
from factorized.planning.candidate import AttentionCandidate, LayerCandidate, Selected


@torch.no_grad()
def spectra_of(
    model: nn.Module, weights: Sequence[Tied], calibration: Calibrated | None, *, precise: bool
) -> list[list[float]]:
    """Return what every rank of every weight keeps, largest first.

    Of weights, these are squared singular values, ``precise`` or not (see ``squared_spectrum``). With calibration they
    are shares of the outputs, equal for all layers, or times the effect on the loss where it has one: what losing the
    whole output would change, by the mean squares of its gradient and of the output. Attention that is taken as a
    whole, layers that never run, and those whose outputs are constant count by the shares of their bare weights, with
    the mean effect of the others, as do layers that the loss does not depend on.
    """
    bare = {tied[0].name: tied[0] for tied in weights}
    if calibration is None:
        return [squared_spectrum(first, precise=precise).tolist() for first in bare.values()]
    first = {name: one for name, one in bare.items() if isinstance(one, LayerCandidate)}
    for one in first.values():
        _checked_weight(one)
    sharing = {tied[0].name: {one.name: one.module for one in tied} for tied in weights if tied[0].name in first}
    found: dict[str, Tensor] = {}
    effects: dict[str, float] = {}
    constant: list[str] = []
    for name, collected in collect(model, calibration, sharing, calibration.loss):
        if collected.ran:
            with named(name):
                found[name], effect = _outputs(first[name], collected.moments)
            if effect == 0:
                constant.append(name)
            elif collected.weighs:
                effects[name] = effect
    if never_ran := [name for name in first if name not in found]:
        warn(
            f"calibration: no batch reaches {listed(never_ran)} ({NEVER_CALLED}), so the spectra of the bare weights "
            "are used there",
        )
    if calibration.loss is None:
        effects = dict.fromkeys(found, 1.0)
        if constant:
            warn(
                f"calibration: the outputs of {listed(constant)} are constant on the batches, so the spectra of the "
                "bare weights are used there",
            )
    elif found and not effects:
        raise ValueError("loss of Calibrated(batches) does not depend on the outputs of any layer to factorize")
    elif unweighed := [name for name in found if name not in effects]:
        warn(
            f"calibration: the loss does not depend on {listed(unweighed)}, so the mean effect of the other layers is "
            "assumed there",
        )
    mean = sum(effects.values()) / len(effects) if effects else 1.0
    shares = {
        name: _shares(found[name] if name in found else squared_spectrum(one, precise=precise))
        for name, one in bare.items()
    }
    return [(share * effects.get(name, mean)).tolist() for name, share in shares.items()]


def squared_spectrum(candidate: Selected, *, precise: bool) -> Tensor:  # (full rank,)
    """Return the squared singular values of a weight, summed over its groups; of attention, over forms and heads.

    Those of weights are within 1e-5 of the largest, or within 1e-13 if ``precise``, at twice the time.
    """
    if isinstance(candidate, AttentionCandidate):
        return attention_spectrum(candidate.name, candidate.unit, candidate.forms)
    matrix = to_matrix(_checked_weight(candidate), candidate.shape)
    return squared_singular_values(matrix, precise=precise).sum(dim=0)


def noise_spectrum(spectrum: Sequence[float]) -> list[float]:
    """Return by how much every rank lowers the noise of a layer's outputs, what is lost over what is kept.

    Gradients tell the effect of losing a little of the outputs. Lost over kept is the same for a little, and grows
    without bound, so that no layer is left with next to nothing. The first rank is always bought.
    """
    total, kept = sum(spectrum), list(accumulate(spectrum))
    noise = [total * max(0.0, total - part) / part if part > 0 else 0.0 for part in kept]
    return [0.0, *(before - after for before, after in pairwise(noise))]


def rank_for_energy(energies: Sequence[float], share: float) -> int:
    """Return the smallest rank that keeps ``share`` of a spectrum."""
    kept = list(accumulate(energies))
    return next(rank for rank, energy in enumerate(kept, start=1) if energy >= share * kept[-1])


def _checked_weight(candidate: LayerCandidate) -> Tensor:
    """Return the weight of a layer; raise if it has no values, or ones that are not finite."""
    weight = dense_weight(candidate.module)
    if weight.is_meta:
        raise ValueError(
            f"{candidate.name}: singular values need weights, but the model is on the meta device; "
            'load it, or plan by ratio= or rank_scale= with allocate="uniform"'
        )
    if not all_finite(weight):
        raise ValueError(f"{candidate.name}: weight holds NaN or infinite values, so it has no singular values")
    return weight.reshape(candidate.shape.weight_shape)


def _outputs(candidate: LayerCandidate, moments: Sequence[Moment]) -> tuple[Tensor, float]:  # (full rank,)
    """Return what every rank keeps of the outputs, and what these are, ``Σ ‖weight·x‖²``."""
    weight = dense_weight(candidate.module).reshape(candidate.shape.weight_shape)
    spectrum = output_spectrum(weight, moments, candidate.shape)
    return spectrum, output_error(weight.double(), moments, candidate.shape).item()


def _shares(spectrum: Tensor) -> Tensor:
    return spectrum / spectrum.sum().clamp(min=torch.finfo(spectrum.dtype).tiny)
