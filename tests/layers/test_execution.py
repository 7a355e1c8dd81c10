from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from factorized import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d, FactorizedLinear
from factorized.layers import conv
from factorized.layers.execution import cheapest_conv, cheapest_linear
from factorized.maths.kernel import KernelShape

MACHINES = [("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)]  # device, compiled
SHAPES = {
    "1d": KernelShape.of((512, 512, 9)),
    "2d": KernelShape.of((512, 512, 3, 3)),
    "2d-channel": KernelShape.of((512, 512, 3, 3), kind="channel"),
    "2d-groups": KernelShape.of((1024, 512, 3, 3), groups=2),
    "3d": KernelShape.of((256, 256, 3, 3, 3)),
}


def choose(
    shape: KernelShape, rank: int, device: str = "cpu", compiled: bool = False, depth: int = 0, stride: int = 1
) -> str:
    return cheapest_conv(shape, rank, depth, (stride,) * len(shape.size), device, compiled)


@pytest.mark.parametrize(("device", "compiled"), MACHINES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_overcomplete_convolution_is_composed_first(shape: KernelShape, device: str, compiled: bool) -> None:
    for rank in (shape.full_rank, shape.full_rank + 1, 3 * shape.full_rank):
        assert choose(shape, rank, device, compiled) == "one_conv"


@pytest.mark.parametrize(("device", "compiled"), MACHINES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_thin_convolution_is_never_composed(shape: KernelShape, device: str, compiled: bool) -> None:
    assert choose(shape, shape.full_rank // 64, device, compiled) in ("two_convs", "two_products")


@pytest.mark.parametrize(("device", "compiled"), MACHINES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_there_is_one_rank_from_which_on_composing_pays(shape: KernelShape, device: str, compiled: bool) -> None:
    composed = [choose(shape, rank, device, compiled) == "one_conv" for rank in range(8, shape.full_rank + 1, 8)]
    assert composed == sorted(composed)


def test_on_a_gpu_products_are_chosen_under_a_compiler_only() -> None:
    assert choose(SHAPES["2d"], 16, "cuda", compiled=True) == "two_products"
    assert choose(SHAPES["2d"], 16, "cuda", compiled=False) == "two_convs"


def test_small_kernels_are_composed_where_thin_ways_would_only_move_tensors() -> None:
    assert choose(KernelShape.of((8, 8, 3, 3)), 2) == "one_conv"


@pytest.mark.parametrize(("depth", "expected"), [(0, "two_convs"), (8, "one_conv")])
def test_the_inner_matrices_of_a_convolution_are_counted(depth: int, expected: str) -> None:
    assert choose(SHAPES["2d"], 300, "cuda", depth=depth) == expected


def test_the_positions_that_a_stride_skips_are_counted() -> None:
    # the first of two convolutions runs before the rows are skipped: at stride 4 on four times the positions
    assert choose(SHAPES["2d"], 300, "cuda", stride=1) == "two_convs"
    assert choose(SHAPES["2d"], 300, "cuda", stride=4) == "one_conv"


@pytest.mark.parametrize(
    ("rank", "depth", "expected"),
    [
        (8, 0, "two_products"),
        (200, 0, "two_products"),
        (200, 2, "one_product"),
        (512, 0, "one_product"),
        (900, 1, "one_product"),
    ],
)
def test_a_linear_layer_counts_its_products(rank: int, depth: int, expected: str) -> None:
    assert cheapest_linear(KernelShape.of((512, 512)), rank, depth) == expected
    layer = FactorizedLinear(512, 512, rank, depth=depth, init="kaiming")
    assert layer.chosen_execution() == expected
    assert f"execution={expected}" in repr(layer)


def test_a_convolution_chooses_for_what_it_is_and_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cheapest(*question: Any) -> str:
        asked.append(question)
        return "one_conv"

    monkeypatch.setattr(conv, "cheapest_conv", cheapest)
    layer = FactorizedConv2d(4, 6, 3, 2, stride=(2, 1), depth=1)
    assert layer.chosen_execution() == "one_conv"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer.to("meta").chosen_execution()
    assert asked == [(layer.shape, 2, 1, (2, 1), "cpu", False), (layer.shape, 2, 1, (2, 1), "meta", True)]


class Watch(TorchDispatchMode):
    """Remembers which operations ran and the shapes they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        self.calls.append((func, tuple(y.shape) if isinstance(y, Tensor) else ()))
        return y


CONVOLUTIONS = {"two_convs": 2, "one_conv": 1, "two_products": 0}


def count_convolutions(layer: nn.Module, x: Tensor) -> int:
    with Watch() as watch, torch.no_grad():
        layer(x)
    return sum(func is torch.ops.aten.convolution.default for func, _ in watch.calls)


@pytest.mark.parametrize("execution", FactorizedLinear.executions)
def test_a_linear_layer_forms_its_weight_only_when_told(execution: str) -> None:
    layer = FactorizedLinear(6, 5, 3)
    layer.execution = execution
    with Watch() as watch, torch.no_grad():
        layer(torch.randn(2, 6))
    composed = any(shape[-2:] == (5, 6) for _, shape in watch.calls)
    assert composed == (execution == "one_product")


@pytest.mark.parametrize("execution", FactorizedConv2d.executions)
def test_the_execution_that_is_set_is_taken(execution: str) -> None:
    layer = FactorizedConv2d(4, 6, 3, 2)
    layer.execution = execution
    assert count_convolutions(layer, torch.randn(2, 4, 5, 5)) == CONVOLUTIONS[execution]
    assert f"execution={execution}" in repr(layer)


@pytest.mark.parametrize(("channels", "rank"), [(4, 2), (256, 2)])
def test_the_choice_does_not_depend_on_the_input(channels: int, rank: int) -> None:
    layer = FactorizedConv2d(channels, channels, 3, rank, init="kaiming")
    expected = CONVOLUTIONS[layer.chosen_execution()]
    for shape in [(channels, 3, 3), (1, channels, 3, 3), (16, channels, 3, 3), (1, channels, 16, 16)]:
        assert count_convolutions(layer, torch.randn(shape)) == expected
    x = torch.randn(2, channels, 5, 5).contiguous(memory_format=torch.channels_last)
    assert count_convolutions(layer, x) == expected


@pytest.mark.parametrize(
    ("make", "dense", "execution", "allowed"),
    [
        (partial(FactorizedLinear, 6, 5, 3), nn.Linear(6, 5), "two_convs", '"two_products", "one_product", "auto"'),
        (partial(FactorizedLinear, 6, 5, 3), nn.Linear(6, 5), None, '"two_products", "one_product", "auto"'),
        (
            partial(FactorizedConv1d, 4, 6, 3, 2),
            nn.Conv1d(4, 6, 3),
            "one_product",
            '"two_convs", "one_conv", "two_products", "auto"',
        ),
        (partial(FactorizedConv2d, 4, 6, 3, 2), nn.Conv2d(4, 6, 3), "", '"two_convs", "one_conv"'),
        (partial(FactorizedConv3d, 4, 6, 3, 2), nn.Conv3d(4, 6, 3), "fast", '"two_convs", "one_conv"'),
    ],
)
def test_an_unknown_execution_says_which_there_are(make: Any, dense: nn.Module, execution: Any, allowed: str) -> None:
    message = f"execution must be one of {allowed}.*, got {execution!r}"
    with pytest.raises(ValueError, match=message):
        make(execution=execution)
    with pytest.raises(ValueError, match=message):
        make.func.from_dense(dense, 2, execution=execution)
    layer = make()
    layer.execution = execution
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(2, 6) if isinstance(layer, FactorizedLinear) else torch.randn(2, 4, *(5,) * layer.dims))
