"""``fz.Calibrated``: factors that keep the outputs of layers on given data."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from factorized._checks import check_whole
from factorized.attention.family import is_transposed
from factorized.formats.calibration import added, by_output
from factorized.nn.dense import dense_weight
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import named
from factorized.nn.moments import InputMoments, collecting
from factorized.nn.running import run_once
from factorized.planning.plan import Plan
from factorized.surgery.decompose import decompose_all, refuse_not_finite
from factorized.surgery.progress import Count

LISTED = 5  # layers that a warning names


class Calibrated:
    """An ``init=`` of ``fz.factorize`` that keeps the outputs of layers on ``batches``.

    Spectral initialization minimizes ``‖W - U Vᵀ‖``; this one minimizes ``E‖(W - U Vᵀ)x‖²`` over the inputs ``x`` that
    the layer has while the model runs on the batches: whitened by their second moment, the weight is truncated by its
    SVD. The bias of a layer, where it has one to itself, is adjusted to keep the mean of the outputs; then ``x`` is the
    input less its mean. The model runs without gradients in evaluation mode, and data is moved to its device. A layer
    that never runs gets spectral initialization, and a warning names it. Heads that are cut get it too.

    Args:
        batches: an iterable of batches, such as a ``DataLoader``. A batch is what the model's forward takes: a tensor,
            or a dict of keywords. Of a tuple ``(inputs, labels)``, the first is used; it may itself be a tuple of
            arguments or a dict.
        samples: stop after the batch that brings the number of examples to this many; None takes every batch. Needed
            for iterators that never end.
        layers_per_pass: hold the moments of so many layers at a time, and run the batches once for each such part of
            the model; None runs them once. A layer with n inputs (for a convolution: in channels times taps) takes
            8 n² bytes.

    Raises:
        ValueError: an argument has a wrong value; when used, also if the batches hold no examples or do not run
            through the model.

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
        >>> batches = [torch.randn(32, 16) for _ in range(10)]
        >>> model = fz.factorize(model, fz.LowRank(), rank=4, init=fz.Calibrated(batches, samples=256))
        >>> model[2].rank
        4
    """

    def __init__(
        self, batches: Iterable[Any], *, samples: int | None = None, layers_per_pass: int | None = None
    ) -> None:
        if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
            raise ValueError(
                f"batches must be an iterable of batches, such as a DataLoader, got {type(batches).__name__}; put a "
                "single batch into a list: [batch]"
            )
        if samples is not None:
            check_whole("samples", samples)
        if layers_per_pass is not None:
            check_whole("layers_per_pass", layers_per_pass)
            if isinstance(batches, Iterator):
                raise ValueError(
                    "layers_per_pass runs the batches several times, which an iterator cannot give; pass a list or a "
                    "DataLoader"
                )
        self.batches, self.samples, self.layers_per_pass = batches, samples, layers_per_pass

    def __repr__(self) -> str:
        given = f"samples={self.samples}, layers_per_pass={self.layers_per_pass}"
        return f"Calibrated({type(self.batches).__name__}, {given})"

    def run(self, model: nn.Module) -> None:
        """Run ``model`` on the batches."""
        seen = 0
        for number, batch in enumerate(self.batches):
            inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
            run_once(model, inputs, f"batch {number} of init=Calibrated(batches)")
            seen += _examples(inputs)
            if self.samples is not None and seen >= self.samples:
                return
        if not seen:
            raise ValueError(
                "init=Calibrated(batches): batches holds no examples. An iterator that was used before is empty: pass "
                "a list or a DataLoader. Nothing was changed"
            )


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
    sharing: dict[str, list[str]] = {}
    for entry in plan.layers:
        sharing.setdefault(entry.tied_to or entry.name, []).append(entry.name)
    held_once = _held_once(model)
    never_ran: dict[str, FactorizedLayer] = {}
    short: dict[str, InputMoments] = {}
    for part in _parts(list(sharing), calibration.layers_per_pass):
        collected = {
            name: InputMoments(
                dense[name],
                transposed=is_transposed(dense[name]),
                centered=dense[name]._parameters.get("bias") in held_once,
            )
            for leader in part
            for name in sharing[leader]
        }
        with collecting({dense[name]: moments for name, moments in collected.items()}):
            calibration.run(model)
        for leader in part:
            ran = {name: collected[name] for name in sharing[leader] if collected[name].samples}
            if not ran:
                never_ran[leader] = layers[leader]
                continue
            least = min(ran.values(), key=lambda one: one.samples - one.directions)
            short |= {leader: least} if least.samples < least.directions else {}
            with named(leader):
                _fill(layers, leader, weights[leader], ran)
            count.add(1)
    rest = {name: weights[name] for name in never_ran}
    for name, cores in decompose_all(rest, never_ran, count, exact=exact).items():
        layers[name].set_factors(*cores)
    _warn(short, list(never_ran))


def _fill(layers: Mapping[str, FactorizedLayer], leader: str, weight: Tensor, ran: Mapping[str, InputMoments]) -> None:
    """Set the factors of one layer from its weight, and the biases of the layers that share it and ran."""
    format = layers[leader].format
    weight = weight.reshape(format.shape.weight_shape)
    moments = added([one.moment for one in ran.values()])
    if not all(torch.isfinite(moment.sums).all() for moment in moments):
        raise ValueError(
            "its inputs on the batches of init=Calibrated hold NaN or infinite values; nothing was changed"
        )
    layers[leader].set_factors(*format.calibrate(weight, moments))
    lost = weight.double() - format.compose([factor.double() for factor in layers[leader].factors])
    for name, one in ran.items():
        bias = layers[name].bias
        if one.centered and bias is not None:
            bias.add_((by_output(lost, format.shape, one.transposed) @ one.mean.unsqueeze(-1)).flatten())


def _held_once(model: nn.Module) -> set[nn.Parameter | None]:
    """Return the parameters that only one module holds."""
    held = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
    return {parameter for parameter, times in held.items() if times == 1 and parameter is not None}


def _refuse_meta(weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        if weight.is_meta:
            raise ValueError(
                f"{name or 'the model'}: weight is on the meta device, without values, and init=Calibrated runs the "
                "model; load the weights first, or use another init. Nothing was changed"
            )


def _warn(short: Mapping[str, InputMoments], never_ran: Sequence[str]) -> None:
    if short:
        worst = max(short.values(), key=lambda one: one.directions / one.samples)
        warnings.warn(
            f"init=Calibrated: fewer samples than directions in the inputs of {_listed(list(short))}: "
            f"{worst.samples:,} where at least {worst.directions:,} are needed. Directions that no sample has are kept "
            f"by the size of their weights; give {-(-worst.directions // worst.samples)} times as many samples",
            stacklevel=6,
        )
    if never_ran:
        warnings.warn(
            f"init=Calibrated: no batch reaches {_listed(never_ran)} (the module is never called), so spectral "
            "initialization is used there",
            stacklevel=6,
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(name or "the model" for name in names[:LISTED]) + more


def _parts(names: list[str], size: int | None) -> Iterator[list[str]]:
    rest = iter(names)
    while part := list(islice(rest, size)):
        yield part


def _examples(inputs: Any) -> int:
    """Return the size of the batch: the first dimension of its first tensor; 1 where there is none."""
    values = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (tuple, list)) else [inputs]
    )
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim()]
    return tensors[0].shape[0] if tensors else 1
