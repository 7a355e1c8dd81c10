from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorized.maths.light_expansion import expand_for_training
from factorized.maths.tensor_format import TensorFormat
from factorized.maths.tensor_train import TrainFormat
from factorized.maths.tucker import TuckerFormat


@pytest.mark.parametrize(
    ("tensor", "keeps_little"),
    [
        (TuckerFormat((5, 4, 3), (4, 4, 3)), False),
        (TuckerFormat((20, 4, 3), (11, 4, 3)), False),  # more rows than slices
        (TuckerFormat((3, 4, 20), (3, 4, 9), core="train"), False),  # sliced where the core's train ends
        (TuckerFormat((6, 20, 6), (6, 18, 6)), False),  # and where the core has dimensions on both sides
        (TrainFormat((2, 4, 4, 4, 9), (2, 8, 17, 7)), False),
        (TrainFormat((4, 2, 2, 2, 80, 1), (2, 4, 8, 16, 1)), False),
        (TuckerFormat((1, 4, 3), (1, 3, 3)), False),
        (TuckerFormat((6, 5, 3, 2), (6, 5), kept=2), False),
        (TuckerFormat((5, 4, 3), (4, 4, 3), core="train"), False),
        (TuckerFormat((9, 8, 7), (2, 2, 2)), True),
        (TrainFormat((5, 4, 3), (2, 2)), True),
    ],
    ids=str,
)
def test_gradients_are_those_of_autograd_through_the_plain_expansion(tensor: TensorFormat, keeps_little: bool) -> None:
    torch.manual_seed(0)
    assert tensor.keeps_little == keeps_little
    cores = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in tensor.core_shapes]
    at = torch.randn(tensor.dims, dtype=torch.float64)
    plain, light = tensor.expand(cores), expand_for_training(tensor, cores)
    assert torch.equal(plain, light)
    expected = torch.autograd.grad(plain, cores, at)
    for gradient, wanted in zip(torch.autograd.grad(light, cores, at), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


NEAR_FULL = [TuckerFormat((5, 4, 3), (4, 4, 3)), TrainFormat((2, 4, 4, 9), (2, 8, 7))]


@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
def test_second_derivatives_are_those_of_the_plain_expansion(tensor: TensorFormat) -> None:
    torch.manual_seed(0)
    assert not tensor.keeps_little
    cores = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in tensor.core_shapes]

    def twice(expanded: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(expanded.pow(3).sum(), cores, create_graph=True)
        return torch.autograd.grad(torch.stack([gradient.square().sum() for gradient in first]).sum(), cores)

    for actual, wanted in zip(twice(expand_for_training(tensor, cores)), twice(tensor.expand(cores)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's, of a product without vmap rule
@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
def test_gradients_per_example_are_those_of_each_example(tensor: TensorFormat) -> None:
    torch.manual_seed(0)
    cores = tuple(torch.randn(shape, dtype=torch.float64) for shape in tensor.core_shapes)
    examples = torch.randn(3, *tensor.dims, dtype=torch.float64)

    def loss(cores: tuple[Tensor, ...], example: Tensor) -> Tensor:
        return (expand_for_training(tensor, cores) * example).sum().square()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(cores, examples)
    for place, example in enumerate(examples):
        for actual, wanted in zip(together, torch.func.grad(loss)(cores, example), strict=True):
            torch.testing.assert_close(actual[place], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tensor", NEAR_FULL, ids=str)
def test_a_backward_pass_under_autocast_is_the_one_outside(tensor: TensorFormat) -> None:
    torch.manual_seed(0)
    cores = [torch.randn(shape, requires_grad=True) for shape in tensor.core_shapes]
    with torch.autocast("cpu", torch.bfloat16):
        expanded = expand_for_training(tensor, cores)
        inside = torch.autograd.grad(expanded, cores, torch.ones_like(expanded), retain_graph=True)
    outside = torch.autograd.grad(expanded, cores, torch.ones_like(expanded))
    for actual, wanted in zip(inside, outside, strict=True):
        assert torch.equal(actual, wanted)


def test_a_backward_pass_on_the_meta_device_gives_the_shapes() -> None:
    cores = [torch.empty(shape, device="meta", requires_grad=True) for shape in NEAR_FULL[0].core_shapes]
    found = torch.autograd.grad(expand_for_training(NEAR_FULL[0], cores).sum(), cores)
    assert [gradient.shape for gradient in found] == [core.shape for core in cores]
