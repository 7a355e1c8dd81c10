"""``fz.autotune``: choosing how each layer runs by measuring it."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from factorized._checks import check_whole
from factorized.formats.format import Way
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import check_model
from factorized.nn.running import ExampleInput, removing, run_once
from factorized.nn.timing import median_milliseconds, training_step


def autotune(
    model: nn.Module,
    example_input: ExampleInput,
    *,
    rounds: int = 5,
    compiled: bool = False,
) -> dict[str, dict[Way, float]]:
    """Set every layer's ``execution`` to the fastest on this device; return the milliseconds measured, by layer name.

    The model runs once on ``example_input``, in evaluation mode, to see what each layer is given; then each layer is
    timed alone, forward and backward, in every execution, under the autocast that is active around this call. Layers
    with the same settings and inputs are timed once. Torch's random state stays as it is.

    Args:
        model: a factorized model.
        example_input: what its forward takes: a tensor, a tuple of arguments or a dict of keywords.
        rounds: how often each way is timed; the median counts.
        compiled: time the layers compiled, as they would run in a compiled model (inside a CUDA graph on CUDA); this
            takes longer, and often chooses differently.

    Raises:
        ValueError: the model has no factorized linear or convolution, is on the meta device, or does not run on
            ``example_input``; or ``rounds`` is not a whole number of at least 1.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedConv2d(8, 8, 3, 4), nn.ReLU())
        >>> milliseconds = fz.autotune(model, torch.randn(2, 8, 16, 16))
        >>> sorted(milliseconds["0"])
        ['chain', 'composed', 'products']
    """
    check_model(model)
    check_whole("rounds", rounds)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FactorizedLayer)}
    names = {module: name for name, module in layers.items() if module.tunable}
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no factorized linear or convolution to tune; call fz.factorize first"
        )
    if (empty := next((name for layer, name in names.items() if layer.factors[0].is_meta), None)) is not None:
        raise ValueError(f"{empty or 'the model'} is on the meta device, where nothing is computed that could be timed")
    seen: dict[FactorizedLayer, Tensor] = {}
    hooks = [layer.register_forward_pre_hook(partial(_remember, seen, layer), with_kwargs=True) for layer in names]
    with removing(hooks):
        run_once(model, example_input)
    measured: dict[tuple[object, ...], dict[Way, float]] = {}
    result = {}
    for layer, x in seen.items():
        alike = _what_matters(layer, x)
        if alike not in measured:
            measured[alike] = _time_executions(layer, x, rounds, compiled)
        result[names[layer]] = measured[alike]
        fastest: Way = min(measured[alike], key=measured[alike].__getitem__)
        layer.execution = fastest
    return result


def _remember(
    seen: dict[FactorizedLayer, Tensor],
    layer: FactorizedLayer,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    keywords: dict[str, Tensor],
) -> None:
    x = inputs[0] if inputs else keywords["input"]
    seen.setdefault(layer, x.detach())


def _what_matters(layer: FactorizedLayer, x: Tensor) -> tuple[object, ...]:
    trains = tuple(parameter.requires_grad for parameter in layer.parameters())
    dtype = layer.factors[0].dtype
    return (type(layer), layer.format, layer.geometry, trains, x.shape, x.stride(), x.dtype, dtype)


def _time_executions(layer: FactorizedLayer, x: Tensor, rounds: int, compiled: bool) -> dict[Way, float]:
    trains = any(parameter.requires_grad for parameter in layer.parameters())
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        x = torch.empty_like(x).normal_().requires_grad_(trains)
        steps = {}
        for execution in layer.executions:
            candidate = deepcopy(layer)
            candidate.execution = execution
            candidate.drop_connect = 0.0  # with it every execution composes in training; this is for all other calls
            steps[execution] = training_step(candidate, x, compiled)
        return median_milliseconds(steps, cuda=x.is_cuda, rounds=rounds, repeats=10 if x.is_cuda else 1)
