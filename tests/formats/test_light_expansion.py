from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.fx import GraphModule

from factorized.formats.kernel import KernelShape
from factorized.formats.light_expansion import light_expansion
from factorized.formats.tensor_format import TensorFormat
from factorized.formats.tensor_train import TrainFormat
from factorized.formats.tucker import CoreKind, TuckerFormat


def folded(dims: tuple[int, ...], kept: int = 0) -> KernelShape:
    """Return the shape of a weight that is folded into ``dims``, of which the last are those of its kernel."""
    channels = dims[: len(dims) - kept]
    return KernelShape(channels[0], prod(channels[1:]), dims[len(channels) :])


def tucker(dims: tuple[int, ...], ranks: tuple[int, ...], kept: int = 0, core: CoreKind = "whole") -> TuckerFormat:
    return TuckerFormat(folded(dims, kept), dims, ranks, core)


def train(dims: tuple[int, ...], ranks: tuple[int, ...]) -> TrainFormat:
    return TrainFormat(folded(dims), dims, ranks)


@pytest.mark.parametrize(
    ("tensor", "keeps_little"),
    [
        (tucker((5, 4, 3), (4, 4, 3)), False),
        (tucker((20, 4, 3), (11, 4, 3)), False),  # more rows than slices
        (tucker((3, 4, 20), (3, 4, 9), core="train"), False),  # sliced where the core's train ends
        (tucker((6, 20, 6), (6, 18, 6)), False),  # and where the core has dimensions on both sides
        (train((2, 4, 4, 4, 9), (2, 8, 17, 7)), False),
        (train((4, 2, 2, 2, 80, 1), (2, 4, 8, 16, 1)), False),
        (tucker((1, 4, 3), (1, 3, 3)), False),
        (tucker((6, 5, 3, 2), (6, 5), kept=2), False),
        (tucker((5, 4, 3), (4, 4, 3), core="train"), False),
        (tucker((9, 8, 7), (2, 2, 2)), True),
        (train((5, 4, 3), (2, 2)), True),
    ],
    ids=str,
)
def test_gradients_are_those_of_autograd_through_the_plain_expansion(tensor: TensorFormat, keeps_little: bool) -> None:
    torch.manual_seed(0)
    assert tensor.keeps_little == keeps_little
    cores = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in tensor.core_shapes]
    at = torch.randn(tensor.dims, dtype=torch.float64)
    plain = tensor.expand(cores)
    light = light_expansion(tensor.expand, tensor.indices, cores)
    assert torch.equal(plain, light)
    expected = torch.autograd.grad(plain, cores, at)
    for gradient, wanted in zip(torch.autograd.grad(light, cores, at), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


NEAR_FULL = [tucker((5, 4, 3), (4, 4, 3)), train((2, 4, 4, 9), (2, 8, 7))]


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
def test_it_is_differentiable_forwards(tensor: TensorFormat, frozen: int) -> None:
    torch.manual_seed(0)
    cores = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in tensor.core_shapes]
    tangents = [torch.randn_like(core) for core in cores[frozen:]]

    def derivative(expand: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        with dual_level():
            moving = [make_dual(core, tangent) for core, tangent in zip(cores[frozen:], tangents, strict=True)]
            return unpack_dual(expand([*cores[:frozen], *moving])).tangent

    light = derivative(lambda cores: light_expansion(tensor.expand, tensor.indices, cores))
    torch.testing.assert_close(light, derivative(tensor.expand), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
def test_second_derivatives_are_those_of_the_plain_expansion(tensor: TensorFormat) -> None:
    torch.manual_seed(0)
    assert not tensor.keeps_little
    cores = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in tensor.core_shapes]

    def twice(expanded: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(expanded.pow(3).sum(), cores, create_graph=True)
        return torch.autograd.grad(torch.stack([gradient.square().sum() for gradient in first]).sum(), cores)

    for actual, wanted in zip(
        twice(light_expansion(tensor.expand, tensor.indices, cores)), twice(tensor.expand(cores)), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's, of a product without vmap rule
@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
def test_gradients_per_example_are_those_of_each_example(tensor: TensorFormat) -> None:
    torch.manual_seed(0)
    cores = tuple(torch.randn(shape, dtype=torch.float64) for shape in tensor.core_shapes)
    examples = torch.randn(3, *tensor.dims, dtype=torch.float64)

    def loss(cores: tuple[Tensor, ...], example: Tensor) -> Tensor:
        return (light_expansion(tensor.expand, tensor.indices, cores) * example).sum().square()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(cores, examples)
    for place, example in enumerate(examples):
        for actual, wanted in zip(together, torch.func.grad(loss)(cores, example), strict=True):
            torch.testing.assert_close(actual[place], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
def test_a_backward_pass_under_autocast_is_the_one_outside(tensor: TensorFormat) -> None:
    torch.manual_seed(0)
    cores = [torch.randn(shape, requires_grad=True) for shape in tensor.core_shapes]
    with torch.autocast("cpu", torch.bfloat16):
        expanded = light_expansion(tensor.expand, tensor.indices, cores)
        inside = torch.autograd.grad(expanded, cores, torch.ones_like(expanded), retain_graph=True)
    outside = torch.autograd.grad(expanded, cores, torch.ones_like(expanded))
    for actual, wanted in zip(inside, outside, strict=True):
        assert torch.equal(actual, wanted)


def test_a_backward_pass_on_the_meta_device_gives_the_shapes() -> None:
    cores = [torch.empty(shape, device="meta", requires_grad=True) for shape in NEAR_FULL[0].core_shapes]
    found = torch.autograd.grad(light_expansion(NEAR_FULL[0].expand, NEAR_FULL[0].indices, cores).sum(), cores)
    assert [gradient.shape for gradient in found] == [core.shape for core in cores]


@pytest.mark.parametrize("tensor", [*NEAR_FULL, tucker((20, 18, 16), (14, 13, 12), core="train")], ids=str)
def test_a_compiled_expansion_has_one_product_per_step_and_two_for_its_gradients(tensor: TensorFormat) -> None:
    torch.manual_seed(0)
    products: list[int] = []

    def count(program: GraphModule, _: object) -> Any:
        called = [node for node in program.graph.nodes if node.op == "call_function"]
        products.append(sum(str(node.target) in ("aten.mm.default", "aten.bmm.default") for node in called))
        return make_boxed_func(program)

    assert not tensor.keeps_little
    cores = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in tensor.core_shapes]
    compiled = torch.compile(tensor.compose, backend=aot_autograd(fw_compiler=count), fullgraph=True)
    weight = compiled(cores)
    at = torch.randn_like(weight)
    found = torch.autograd.grad(weight, cores, at)
    steps = len(cores) - 1
    assert products == [steps, 2 * steps]
    for actual, wanted in zip(found, torch.autograd.grad(tensor.compose(cores), cores, at), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
@pytest.mark.parametrize("frozen", [True, False])
def test_nothing_is_recorded_where_nothing_needs_a_gradient(tensor: TensorFormat, frozen: bool) -> None:
    cores = [torch.randn(shape, requires_grad=not frozen) for shape in tensor.core_shapes]
    with torch.set_grad_enabled(frozen):
        assert not light_expansion(tensor.expand, tensor.indices, cores).requires_grad


@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
def test_a_trace_passes_the_check_of_torch_and_holds_torchs_functions_only(tensor: TensorFormat) -> None:
    cores = tuple([torch.randn(shape, requires_grad=True) for shape in tensor.core_shapes])
    traced = torch.jit.trace(lambda *cores: tensor.compose(cores), cores)
    assert "PythonOp" not in str(traced.graph)
    torch.testing.assert_close(traced(*cores), tensor.compose(cores))
