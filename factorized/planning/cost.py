"""What layers cost in multiply-accumulates (MACs), dense and factorized."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from factorized.attention.cost import AttentionCall, watch
from factorized.attention.family import is_transposed
from factorized.attention.unit import AttentionUnit
from factorized.formats.format import Call, Format
from factorized.formats.kernel import KernelShape
from factorized.nn.held_weight import HeldWeight
from factorized.nn.running import ExampleInput, removing, run_once

# Torch's counter supports attention on every device except the CPU, where it would count nothing.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Measured:
    """What one forward pass on the example input called and computed."""

    macs: int  # of the whole model
    calls: dict[nn.Module, list[Call]]
    attention: dict[nn.Module, list[AttentionCall]] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerCost:
    """What one weight costs in a format, or dense (``None``). Tied layers share it and add up their calls."""

    shape: KernelShape
    calls: tuple[Call, ...] = ()

    def params(self, format: Format | None) -> int:
        """Return the entries of the weight or of its cores."""
        return self.shape.numel if format is None else format.numel

    def macs(self, format: Format | None) -> int:
        """Return the MACs of all calls; a dense table is looked up and multiplies nothing."""
        if format is not None:
            return sum(format.macs(call) for call in self.calls)
        return sum(call.outputs * self.shape.numel for call in self.calls if not call.looked_up)


def measure(
    model: nn.Module,
    example_input: ExampleInput,
    shapes: Mapping[nn.Module, KernelShape],
    units: Mapping[nn.Module, AttentionUnit] | None = None,
) -> Measured:
    """Count the MACs of one run of ``model`` on ``example_input``, without gradients and in evaluation mode."""
    _refuse_lazy(model)
    calls: dict[nn.Module, list[Call]] = {module: [] for module in shapes}
    hooks = [
        module.register_forward_hook(partial(_record, calls[module], shape), with_kwargs=True)
        for module, shape in shapes.items()
        if not isinstance(module, HeldWeight)
    ]
    attention, watching = watch(units or {})
    counter = FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: _attention_flops})
    unseen, holding = _watch_holders(model, calls, counter)
    with removing([*hooks, *watching, *holding]), counter, warnings.catch_warnings():
        # the counter's own hooks, of which torch warns where a compiled module is called
        warnings.filterwarnings("ignore", r".*global hooks on modules", UserWarning)
        run_once(model, example_input)
    return Measured(counter.get_total_flops() // 2 + sum(unseen), calls, attention)


def _watch_holders(
    model: nn.Module, calls: Mapping[nn.Module, list[Call]], counter: FlopCounterMode
) -> tuple[list[int], list[RemovableHandle]]:
    """Record the calls of modules that hold weights; return what torch's counter misses in each, and the hooks.

    It knows neither oneDNN's LSTM nor cuDNN's recurrent networks.
    """
    held = {module.weight: module for module in calls if isinstance(module, HeldWeight)}
    started, unseen, handles = [0], [], []

    def start(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        started[0] = counter.get_total_flops() // 2

    def end(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], y: Any) -> None:
        total = 0
        for weight in (held[p] for p in module._parameters.values() if p is not None and p in held):
            positions = weight.positions((*inputs, *keywords.values()))
            calls[weight].append(Call(positions, whole=True))
            total += positions * weight.weight.numel()
        unseen.append(total - (counter.get_total_flops() // 2 - started[0]))

    for module in model.modules():
        if any(p in held for p in module._parameters.values() if p is not None):
            handles += [module.register_forward_pre_hook(start), module.register_forward_hook(end, with_kwargs=True)]
    return unseen, handles


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    *batch, queries, width = query
    return 2 * prod(batch) * queries * key[-2] * (width + value[-1])


def _refuse_lazy(model: nn.Module) -> None:
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ValueError(
            f"{lazy} is not initialized yet, and counting MACs on example_input= would initialize it; run the model "
            "once first"
        )


def _record(
    calls: list[Call],
    shape: KernelShape,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    keywords: dict[str, Tensor],
    y: Tensor,
) -> None:
    x = inputs[0] if inputs else keywords["input"]
    if isinstance(module, nn.Embedding):
        calls.append(Call(x.numel(), looked_up=True))
        return
    if isinstance(module, nn.EmbeddingBag):  # sums and means are widened once per bag
        by_bag = module.mode != "max" and not module.scale_grad_by_freq
        calls.append(Call(len(y) if by_bag else x.numel(), looked_up=True))
        return
    if is_transposed(module) or isinstance(module, _ConvTransposeNd):
        x, y = y, x  # it costs as much as the layer that it transposes, run on its output
    dims = len(shape.size)
    before, after = (tuple(t.shape[t.dim() - dims :]) for t in (x, y))
    calls.append(Call(y.numel() // shape.out_channels // prod(after), before, after))
