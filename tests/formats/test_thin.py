"""Low-rank 3×3 convolutions by custom kernels: where they apply, and, by Triton's interpreter, that they are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

import factorized as fz
from factorized.formats import shifted
from factorized.formats.convolution import Geometry
from factorized.formats.kernel import KernelShape
from factorized.formats.thin import kernels_apply, kernels_suit
from tests.interpreted import needs_interpreter, run_interpreted

INTERPRETED = """
import random
import torch
import torch.nn.functional as F
from factorized.formats.kernel import KernelShape, to_kernel
from factorized.formats.thin import _thin_convolution

random.seed(0), torch.manual_seed(0)
for dtype, most in [(torch.float32, 1e-6), (torch.float16, 2e-3)] * 6:
    n, i, o = random.randint(1, 3), random.choice([3, 16, 20, 70]), random.choice([5, 24, 64, 72])
    h, w, rank = random.randint(3, 9), random.randint(3, 9), random.choice([1, 2, 9, 16, 18, 37, 70])
    stride = random.choice([(1, 1), (2, 2), (2, 1)])
    padding = random.choice([(0, 0, 0, 0), (1, 1, 1, 1), (1, 2, 0, 1), (2, 2, 2, 2)])
    x = torch.randn(n, i, h, w).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    U = (torch.randn(o * 3, rank) / (3 * rank) ** 0.5).requires_grad_()
    V = (torch.randn(i * 3, rank) / (3 * i) ** 0.5).requires_grad_()
    y = _thin_convolution(x, U, V, list(stride), list(padding))[0]
    dy = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, (x, U, V), dy)]
    x, U, V = (tensor.detach().double().requires_grad_() for tensor in (x, U, V))
    kernel = to_kernel((U @ V.mT)[None], KernelShape.of((o, i, 3, 3)))
    top, bottom, left, right = padding
    y = F.conv2d(F.pad(x, (left, right, top, bottom)), kernel, stride=stride)
    expected = [y, *torch.autograd.grad(y, (x, U, V), dy.double())]
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape
        assert (actual.double() - wanted).norm() < most * wanted.norm(), (n, i, o, h, w, rank, stride, padding, dtype)
"""


@pytest.mark.nightly
@needs_interpreter
def test_interpreted_kernels_compute_outputs_and_gradients_of_float64() -> None:
    run_interpreted(INTERPRETED)


SHAPE = KernelShape.of((6, 4, 3, 3))
GEOMETRY = Geometry((1, 1), ((1, 1), (1, 1)), (1, 1))


def given(rank: int = 2, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(2, 4, 8, 8, dtype=dtype).to(memory_format=torch.channels_last)
    return x, torch.randn(18, rank, dtype=dtype), torch.randn(12, rank, dtype=dtype)


def test_half_precision_with_channels_last_suits_them_but_not_on_a_cpu() -> None:
    assert kernels_suit(*given(), SHAPE, GEOMETRY)
    assert not kernels_apply(*given(), SHAPE, GEOMETRY)


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 33},
        {"dtype": torch.float32},
        {"shape": KernelShape.of((6, 4, 1, 3))},
        {"shape": KernelShape.of((6, 4, 3, 3), kind="channel")},
        {"geometry": Geometry((1, 1), ((1, 1), (1, 1)), (2, 2))},
        {"geometry": Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), "reflect")},
        {"layout": torch.contiguous_format},
        {"empty": True},
    ],
    ids=str,
)
def test_other_convolutions_do_not_suit_them(changed: dict[str, Any]) -> None:
    x, U, V = given(changed.get("rank", 2), changed.get("dtype", torch.bfloat16))
    x = x.contiguous(memory_format=changed.get("layout", torch.channels_last))[: 0 if "empty" in changed else None]
    assert not kernels_suit(x, U, V, changed.get("shape", SHAPE), changed.get("geometry", GEOMETRY))


def test_autocast_decides_the_type() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels_suit(*given(dtype=torch.float32), SHAPE, GEOMETRY)
    x, U, V = given()
    assert not kernels_suit(x, U.float(), V.float(), SHAPE, GEOMETRY)


def test_a_batch_of_any_size_gets_no_guard() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    _, U, V = given()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def run(x: Tensor) -> Tensor:
        return x[0] + kernels_suit(x, U, V, SHAPE, GEOMETRY)

    for batch in (5, 7):  # none of them another size of the program
        x = torch.zeros(batch, 4, 8, 8).bfloat16().to(memory_format=torch.channels_last)
        assert not run(x).any()
    assert counter.frame_count == 1


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> fz.FactorizedConv2d:
    """Return a layer that the kernels would run, on whatever device."""
    monkeypatch.setattr(shifted, "kernels_apply", kernels_suit)
    torch._dynamo.reset()
    return fz.FactorizedConv2d(4, 6, 3, 2, stride=2, padding=1, bias=False, execution="products").bfloat16()


def test_compiled_code_calls_them_and_exported_code_does_not(layer: fz.FactorizedConv2d) -> None:
    x, _, _ = given()
    calls: list[str] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return lambda *given: (torch.zeros(2, 6, 4, 4),)

    torch.compile(layer, fullgraph=True, backend=keep)(x)
    assert "factorized.thin_convolution.default" in calls
    for strict in (False, True):
        graph = torch.export.export(layer, (x,), strict=strict).graph
        assert not [node for node in graph.nodes if "thin" in str(node.target)]


def test_traced_shapes_types_and_layouts_are_those_of_the_composed_layer(
    layer: fz.FactorizedConv2d, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifted, "kernels_apply", lambda *given: True)
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for layer.execution in ("products", "composed"):
            x = torch.randn(2, 4, 7, 9, dtype=torch.bfloat16).to(memory_format=torch.channels_last).requires_grad_()
            y = layer(x)
            gradients = torch.autograd.grad(y.float().sum(), (x, *layer.parameters()))
            found.append([(tensor.shape, tensor.dtype) for tensor in (y, *gradients)])
            found[-1] += [tensor.stride() for tensor in (y, gradients[0])]
    assert found[0] == found[1]
