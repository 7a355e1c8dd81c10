from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from factorized import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d, FactorizedLinear
from factorized.formats import cost
from factorized.formats.format import WAYS
from factorized.formats.kernel import KernelShape
from factorized.formats.product import Product

MACHINES = [  # device, compiled
    ("cpu", False),
    ("cpu, channels last", False),
    ("cpu, fast products", False),
    ("cuda", False),
    ("cpu", True),
    ("cpu, fast products", True),
    ("cuda", True),
]
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
    costs = Product(shape, rank, depth).ways((stride,) * len(shape.size), device, compiled)
    return min(costs, key=costs.__getitem__)


@pytest.mark.parametrize(("device", "compiled"), MACHINES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_overcomplete_convolution_is_composed_first(shape: KernelShape, device: str, compiled: bool) -> None:
    for rank in (shape.full_rank, shape.full_rank + 1, 3 * shape.full_rank):
        assert choose(shape, rank, device, compiled) == "composed"


@pytest.mark.parametrize(("device", "compiled"), MACHINES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_thin_convolution_is_never_composed(shape: KernelShape, device: str, compiled: bool) -> None:
    assert choose(shape, shape.full_rank // 64, device, compiled) in ("chain", "products")


@pytest.mark.parametrize(("device", "compiled"), MACHINES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_there_is_one_rank_from_which_on_composing_pays(shape: KernelShape, device: str, compiled: bool) -> None:
    composed = [choose(shape, rank, device, compiled) == "composed" for rank in range(8, shape.full_rank + 1, 8)]
    assert composed == sorted(composed)


def test_on_a_gpu_products_are_chosen_under_a_compiler_only() -> None:
    assert choose(SHAPES["2d"], 16, "cuda", compiled=True) == "products"
    assert choose(SHAPES["2d"], 16, "cuda", compiled=False) == "chain"


def test_small_kernels_are_composed_where_thin_ways_would_only_move_tensors() -> None:
    assert choose(KernelShape.of((8, 8, 3, 3)), 2) == "composed"


@pytest.mark.parametrize(("depth", "expected"), [(0, "chain"), (8, "composed")])
def test_the_inner_matrices_of_a_convolution_are_counted(depth: int, expected: str) -> None:
    assert choose(SHAPES["2d"], 300, "cuda", depth=depth) == expected


def test_the_positions_that_a_stride_skips_are_counted() -> None:
    # the first of two convolutions runs before the rows are skipped: at stride 4 on four times the positions
    assert choose(SHAPES["2d"], 300, "cuda", stride=1) == "chain"
    assert choose(SHAPES["2d"], 300, "cuda", stride=4) == "composed"


@pytest.mark.parametrize(
    ("rank", "depth", "expected"),
    [(8, 0, "chain"), (200, 0, "chain"), (200, 2, "composed"), (512, 0, "composed"), (900, 1, "composed")],
)
def test_a_linear_layer_counts_its_products(rank: int, depth: int, expected: str) -> None:
    layer = FactorizedLinear(512, 512, rank, depth=depth, init="kaiming")
    assert layer.chosen_execution() == expected
    assert f"execution={expected}" in repr(layer)


def test_a_convolution_chooses_for_what_it_is_and_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ways(self: Product, *question: Any) -> dict[str, float]:
        asked.append((self, *question))
        device, compiled = question[1:]
        return {"composed": 3 if device == "cuda" else 1, "chain": 2, "products": 1 if compiled else 5}

    monkeypatch.setattr(Product, "ways", ways)
    layer = FactorizedConv2d(4, 6, 3, 2, stride=(2, 1), depth=1)
    assert asked == [(Product(layer.shape, 2, 1), (2, 1), device, compiled) for device, compiled in MACHINES]
    assert layer.chosen_execution() == "composed"
    assert layer.to("meta").chosen_execution() == "chain"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert layer.chosen_execution() == "products"


class Watch(TorchDispatchMode):
    """Remembers which operations ran and the shapes they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        self.calls.append((func, tuple(y.shape) if isinstance(y, Tensor) else ()))
        return y


CONVOLUTIONS = {"chain": 2, "composed": 1, "products": 0}


def count_convolutions(layer: nn.Module, x: Tensor) -> int:
    with Watch() as watch, torch.no_grad():
        layer(x)
    return sum(func is torch.ops.aten.convolution.default for func, _ in watch.calls)


def count_operators(layer: nn.Module, x: Tensor) -> Counter[str]:
    with Watch() as watch, torch.no_grad():
        layer(x)
    return Counter(str(func.overloadpacket).removeprefix("aten.") for func, _ in watch.calls)


@pytest.mark.parametrize(("last", "copies"), [(False, 2), (True, 0)])
def test_a_chain_makes_two_views_of_each_factor_and_at_most_one_copy(last: bool, copies: int) -> None:
    layer = FactorizedConv2d(64, 64, 3, 9, padding=1, execution="chain", init="kaiming")
    operators = count_operators(layer, images(1, 64, 8, 8, last=last))
    assert operators == Counter(view=2, permute=2, clone=copies, convolution=2)


def test_a_transposed_chain_adds_its_bias_within_the_last_product() -> None:
    layer = FactorizedLinear(6, 5, 3, execution="chain", dense_type=Conv1D)
    operators = count_operators(layer, torch.randn(2, 6))
    assert (operators["mm"], operators["addmm"], operators["add"]) == (1, 1, 0)


@pytest.mark.parametrize("execution", ["chain", "composed"])
def test_a_linear_layer_forms_its_weight_only_when_told(execution: str) -> None:
    layer = FactorizedLinear(6, 5, 3)
    layer.execution = execution
    with Watch() as watch, torch.no_grad():
        layer(torch.randn(2, 6))
    composed = any(shape[-2:] == (5, 6) for _, shape in watch.calls)
    assert composed == (execution == "composed")


@pytest.mark.parametrize("execution", WAYS)
def test_the_execution_that_is_set_is_taken(execution: str) -> None:
    layer = FactorizedConv2d(4, 6, 3, 2)
    layer.execution = execution
    assert count_convolutions(layer, torch.randn(2, 4, 5, 5)) == CONVOLUTIONS[execution]
    assert f"execution={execution}" in repr(layer)


def images(*shape: int, last: bool = False) -> Tensor:
    x = torch.randn(shape)
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("last", [False, True])
def test_small_layers_are_composed_whatever_their_input(last: bool) -> None:
    layer = FactorizedConv2d(4, 4, 3, 2, init="kaiming")
    for shape in [(1, 4, 3, 3), (16, 4, 3, 3), (1, 4, 64, 64)]:
        assert count_convolutions(layer, images(*shape, last=last)) == CONVOLUTIONS["composed"]


@pytest.fixture(params=[False, True], ids=["other", "AMD"])
def is_amd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cost, "IS_AMD", request.param)
    return bool(request.param)


@pytest.mark.parametrize(
    ("shape", "last", "gradients", "amd", "other"),
    [
        ((1, 64, 7, 9), False, False, "products", "products"),
        ((1, 64, 7, 9), True, False, "chain", "products"),
        ((64, 7, 9), False, False, "products", "products"),  # without a batch
        ((1, 64, 7, 9), False, True, "chain", "products"),
        ((1, 64, 7, 9), True, True, "chain", "products"),
        ((1, 64, 8, 8), False, False, "chain", "products"),
        ((1, 64, 8, 8), True, False, "chain", "products"),
        ((64, 8, 8), False, False, "chain", "products"),
        ((2, 64, 32, 32), False, False, "chain", "products"),
        ((2, 64, 32, 32), True, False, "chain", "chain"),
        ((2, 64, 32, 32), True, True, "chain", "chain"),
        ((2, 64, 32, 31), True, True, "chain", "products"),
    ],
)
def test_a_processor_chooses_by_positions_layout_and_gradients(
    shape: tuple[int, ...], last: bool, gradients: bool, amd: str, other: str, is_amd: bool
) -> None:
    layer, x = FactorizedConv2d(64, 64, 3, 9, padding=1, init="kaiming"), images(*shape, last=last)
    with torch.set_grad_enabled(gradients):
        assert layer.chosen_execution(x) == (amd if is_amd else other)
        chosen = CONVOLUTIONS[layer.chosen_execution(x)]
    if not gradients:
        assert count_convolutions(layer, x) == chosen
    assert layer.chosen_execution() == ("chain" if is_amd else "products")
    torch.testing.assert_close(layer(x), layer.to_dense()(x), rtol=1e-4, atol=1e-4)


def test_pointwise_convolutions_are_multiplied_but_with_channels_last_on_an_amd_processor(is_amd: bool) -> None:
    layer = FactorizedConv2d(64, 128, 1, 7, init="kaiming")
    assert layer.chosen_execution(images(2, 64, 32, 32, last=True)) == ("chain" if is_amd else "products")
    assert layer.chosen_execution(images(2, 64, 32, 32)) == "products"
    assert layer.chosen_execution() == "products"


@pytest.mark.parametrize(
    ("told", "expected"),
    [("vendor_id\t: AuthenticAMD\n", True), ("vendor_id\t: GenuineIntel\n", False), (None, False)],
)
def test_the_processor_is_what_the_system_says(
    told: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told is not None:
        (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(cost, "Path", lambda name: tmp_path / Path(name).name)
    monkeypatch.delenv("PROCESSOR_IDENTIFIER", raising=False)
    assert ("AuthenticAMD" in cost.processor()) == expected
    if told is None:
        monkeypatch.setenv("PROCESSOR_IDENTIFIER", "AMD64 Family 25, AuthenticAMD")
        assert "AuthenticAMD" in cost.processor()


def test_an_execution_that_is_set_is_taken_in_every_layout() -> None:
    layer = FactorizedConv2d(64, 64, 3, 9, init="kaiming", execution="products")
    assert layer.chosen_execution(images(2, 64, 32, 32, last=True)) == "products"


def test_another_device_does_not_look_at_the_input() -> None:
    layer, x = FactorizedConv2d(64, 64, 3, 9, init=None, device="meta"), images(1, 64, 2, 2).to("meta")
    with torch.no_grad():
        assert layer.chosen_execution() == layer.chosen_execution(x) == "composed"


def test_compiled_code_needs_no_guard_on_the_layout_or_the_batch(is_amd: bool) -> None:
    layer, x = FactorizedConv2d(64, 64, 3, 9, padding=1, init="kaiming").eval(), images(2, 64, 32, 32, last=True)
    torch._dynamo.reset()
    counter = CompileCounter()
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for extent in (32, 5):
            y = x.repeat(3, 1, 1, 1)[:, :, :extent, :extent].contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(run(y), layer(y))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_does_not_look_at_the_input(is_amd: bool) -> None:
    layer, x = FactorizedConv2d(64, 64, 3, 9, padding=1, init="kaiming").eval(), images(1, 64, 2, 2)
    with torch.no_grad():
        traced = torch.jit.trace(layer, x)
    assert str(traced.inlined_graph).count("aten::_convolution") == CONVOLUTIONS[layer.chosen_execution()]
    torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("execution", ["composed", "chain"])
def test_a_trace_passes_the_check_that_torch_makes_without_gradients(execution: Any) -> None:
    layer, x = FactorizedConv2d(8, 8, 3, 3, padding=1, execution=execution).eval(), torch.randn(2, 8, 6, 6)
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(x), layer(x))


def test_a_program_does_not_depend_on_the_layout_or_the_batch(is_amd: bool) -> None:
    layer, x = FactorizedConv2d(64, 64, 3, 9, padding=1, init="kaiming").eval(), images(2, 64, 7, 7)
    shapes = {"input": {0: torch.export.Dim("batch", min=1, max=64)}}
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes=shapes)
    assert program.graph_module.code.count("aten.conv2d") == CONVOLUTIONS[layer.chosen_execution()]
    for y in (x, x[:1], x.repeat(4, 1, 1, 1)):
        torch.testing.assert_close(program.module()(y), layer(y))


@pytest.mark.parametrize(
    ("make", "dense", "execution", "allowed"),
    [
        (partial(FactorizedLinear, 6, 5, 3), nn.Linear(6, 5), "products", '"auto", "chain", "composed"'),
        (partial(FactorizedLinear, 6, 5, 3), nn.Linear(6, 5), None, '"auto", "chain", "composed"'),
        (partial(FactorizedConv1d, 4, 6, 3, 2), nn.Conv1d(4, 6, 3), "one", '"auto", "composed", "chain", "products"'),
        (partial(FactorizedConv2d, 4, 6, 3, 2), nn.Conv2d(4, 6, 3), "", '"auto", "composed", "chain", "products"'),
        (partial(FactorizedConv3d, 4, 6, 3, 2), nn.Conv3d(4, 6, 3), "fast", '"auto", "composed", "chain", "products"'),
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
