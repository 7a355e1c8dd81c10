"""What compression does to every layer: its spectrum, what it lost, and how its outputs differ from the dense ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorized.formats.calibration import output_spectrum
from factorized.nn.dense import dense_weight
from factorized.nn.held_weight import named_layers
from factorized.nn.model import named
from factorized.nn.running import moved, removing, run_once
from factorized.planning.calibration import Calibrated, collect
from factorized.planning.plan import Plan

CPU = torch.device("cpu")
POINTS = 200  # of a spectrum that is kept: enough to draw it


@torch.no_grad()
def output_spectra(model: nn.Module, plan: Plan, calibration: Calibrated) -> dict[str, list[float]]:
    """Return, by layer of the plan, the share of its outputs that each rank keeps, largest first; none for others."""
    modules = named_layers(model)
    formats = {entry.name: entry.format for entry in plan.layers if entry.format is not None and entry.tied_to is None}
    sharing: dict[str, dict[str, nn.Module]] = {name: {} for name in formats}
    for entry in plan.layers:
        sharing[entry.tied_to or entry.name][entry.name] = modules[entry.name]
    found: dict[str, list[float]] = {}
    for name, collected in collect(model, calibration, sharing):
        shape = formats[name].shape
        if collected.ran:
            with named(name):
                weight = dense_weight(modules[name]).reshape(shape.weight_shape)
                spectrum = output_spectrum(weight, collected.moments, shape)
                found[name] = (spectrum / spectrum.sum().clamp(min=torch.finfo(spectrum.dtype).tiny)).tolist()
    return found


def layer_rows(plan: Plan, spectra: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return what the page shows of every layer of a plan."""
    rows = []
    for entry in plan.layers:
        spectrum = spectra.get(entry.tied_to or entry.name)
        rank = entry.rank if isinstance(entry.rank, int) else 0
        step = max(1, -(-len(spectrum) // POINTS)) if spectrum else 1
        rows.append(
            {
                "name": entry.name,
                "type": entry.type,
                "shape": list(entry.shape),
                "rank": rank,
                "full_rank": len(spectrum) if spectrum else None,
                "params": entry.params,
                "params_after": entry.params_after,
                "tied_to": entry.tied_to,
                "spectrum": spectrum[::step] if spectrum else None,
            }
        )
    return rows


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: what it was called with, and its output, on the CPU."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor

    @property
    def has_output(self) -> bool:
        """Whether the output is not all zeros, to which nothing can be relative."""
        return bool(self.output.any())


def layer_calls(model: nn.Module, names: Sequence[str], batch: Any) -> dict[str, LayerCall]:
    """Return the last call of some layers while the model runs on one batch; layers that never run have none."""
    seen: dict[str, LayerCall] = {}

    def keep(name: str, *call: Any) -> None:
        # copies, as the code after the layer may write to its inputs and outputs
        seen[name] = LayerCall(*(moved(value, CPU, copy=True) for value in call))

    _watch(model, names, batch, keep)
    return seen


def _watch(model: nn.Module, names: Iterable[str], batch: Any, see: Callable[..., None]) -> None:
    """Run the model on one batch; ``see`` gets the name, arguments, keywords and output of every call of the layers."""

    def hook_of(name: str) -> Callable[..., None]:
        return lambda module, arguments, keywords, output: see(name, arguments, keywords, output)

    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_hook(hook_of(name), with_kwargs=True) for name in names if name in modules]
    with removing(hooks):
        run_once(model, batch[0] if isinstance(batch, (tuple, list)) else batch, "a batch")


@torch.no_grad()
def losses_alone(model: nn.Module, calls: dict[str, LayerCall]) -> dict[str, float]:
    """Return ``‖y' - y‖² / ‖y‖²`` of layers that are called as the dense ones were: what each loses by itself."""
    device = next(model.parameters()).device
    return {
        name: _relative(model.get_submodule(name)(*moved(one.arguments, device), **moved(one.keywords, device)), one)
        for name, one in calls.items()
        if one.has_output
    }


def differences(model: nn.Module, calls: dict[str, LayerCall], batch: Any) -> dict[str, float]:
    """Return ``‖y' - y‖² / ‖y‖²`` of the layers of a network on the batch of the dense network's calls.

    It is what a layer and those before it changed. Outputs are compared as they come, and none are held.
    """
    found: dict[str, float] = {}

    def compare(name: str, arguments: Any, keywords: Any, output: Tensor) -> None:
        found[name] = _relative(output, calls[name])  # of the last call

    _watch(model, [name for name, one in calls.items() if one.has_output], batch, compare)
    return {name: found[name] for name in calls if name in found}


def _relative(output: Tensor, dense: LayerCall) -> float:
    y = dense.output.double()
    return ((output.double().cpu() - y).square().sum() / y.square().sum()).item()
