"""What layers cost in multiply-accumulates (MACs), dense and factorized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from factorized.adapters.family import is_transposed
from factorized.adapters.unit import AttentionUnit
from factorized.maths.folding import Rank
from factorized.maths.kernel import KernelShape
from factorized.planning.attention import AttentionCall, watch

# Torch's counter knows attention on every device but this one, where it would count nothing.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ExampleInput = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """The sizes one call of a layer saw."""

    positions: int  # batch × output positions: what a pointwise layer multiplies at
    row_positions: int  # the same before the rows' stride: what the first factor of a convolution multiplies at
    input_positions: int  # before all strides: what a pointwise layer in front of it multiplies at


@dataclass(frozen=True)
class Measured:
    """What one forward pass on the example input did."""

    macs: int  # of the whole model
    calls: dict[nn.Module, list[Call]]
    attention: dict[nn.Module, list[AttentionCall]] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerCost:
    """What one weight costs at a rank, or dense (``rank=None``). Tied layers share it and add up their calls."""

    shape: KernelShape
    depth: int = 0
    multiplied: tuple[Call, ...] = ()  # calls of layers that multiply by the weight
    looked_up: tuple[Call, ...] = ()  # calls of embeddings, which multiply nothing when dense

    def params(self, rank: Rank | None) -> int:
        """Return the entries of the weight or of its factors."""
        if rank is None:
            return self.shape.numel
        assert isinstance(rank, int)
        return self.shape.factor_numel(rank, self.depth)

    def macs(self, rank: Rank | None) -> int:
        """Return the MACs of all calls: those of ``V`` and the inner matrices, then those of ``U``."""
        positions = sum(call.positions for call in self.multiplied)
        if rank is None:
            return positions * self.shape.numel
        assert isinstance(rank, int)
        row_positions = sum(call.row_positions for call in self.multiplied)
        inner = self.shape.groups * self.depth * rank * rank
        first = self.shape.groups * rank * self.shape.columns + inner
        second = self.shape.groups * rank * self.shape.rows
        return row_positions * first + positions * second + sum(call.positions for call in self.looked_up) * first


def measure(
    model: nn.Module,
    example_input: ExampleInput,
    shapes: Mapping[nn.Module, KernelShape],
    units: Mapping[nn.Module, AttentionUnit] | None = None,
) -> Measured:
    """Run ``model`` once on ``example_input``, without gradients and in evaluation mode, and count."""
    _refuse_lazy(model)
    calls: dict[nn.Module, list[Call]] = {module: [] for module in shapes}
    handles = [
        module.register_forward_hook(partial(_record, calls[module], shape), with_kwargs=True)
        for module, shape in shapes.items()
    ]
    attention, watching = watch(units or {})
    counter = FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: _attention_flops})
    try:
        with counter:
            run_once(model, example_input)
    finally:
        for handle in (*handles, *watching):
            handle.remove()
    return Measured(counter.get_total_flops() // 2, calls, attention)


def run_once(model: nn.Module, example_input: ExampleInput) -> None:
    """Run ``model`` on ``example_input`` without gradients, in evaluation mode, every layer called as a module."""
    arguments, keywords = _as_call(example_input, _device_of(model))
    try:
        with torch.no_grad(), evaluation_mode(model), _no_fused_attention():
            model(*arguments, **keywords)
    except Exception as error:
        raise ValueError(
            f"example_input does not run through {type(model).__name__}: {error}. Give what its forward takes: "
            "a tensor, a tuple of arguments or a dict of keywords"
        ) from error


def count_parameters(module: nn.Module) -> int:
    """Return the entries of all parameters; those of lazy layers, which have no size yet, count nothing."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    *batch, queries, width = query
    return 2 * prod(batch) * queries * key[-2] * (width + value[-1])


def _refuse_lazy(model: nn.Module) -> None:
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ValueError(
            f"{lazy} is not initialized yet, and counting on example_input= would do that; run the model once first"
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
        calls.append(Call(x.numel(), x.numel(), x.numel()))
        return
    positions = x.numel() // shape.out_channels if is_transposed(module) else y.numel() // shape.out_channels
    dims = len(shape.size)
    spatial_in, spatial_out = (t.shape[t.dim() - dims :] for t in (x, y))
    rows_in, rows_out = (prod(extents[: shape.row_dims]) for extents in (spatial_in, spatial_out))
    input_positions = positions // prod(spatial_out) * prod(spatial_in)
    calls.append(Call(positions, positions // rows_out * rows_in, input_positions))


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _as_call(example_input: ExampleInput, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(example_input, Tensor):
        return [move(example_input)], {}
    if isinstance(example_input, Mapping):
        return [], {key: move(value) for key, value in example_input.items()}
    return [move(value) for value in example_input], {}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode, and then every module of it back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _no_fused_attention() -> Iterator[None]:
    # The fused encoder layer is one opaque operation that no counter sees into.
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
