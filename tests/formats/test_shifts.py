from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from factorized import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d
from factorized.formats import shifted
from factorized.formats.convolution import Geometry
from factorized.formats.kernel import KernelShape
from factorized.formats.shifts import plan_shifts, shift_and_stack
from factorized.testing import error

CASES: dict[str, tuple[type[Any], dict[str, Any], tuple[int, ...]]] = {
    "same size": (FactorizedConv2d, {"kernel_size": 3, "padding": 1}, (6, 5)),
    "unpadded": (FactorizedConv2d, {"kernel_size": 3}, (6, 5)),
    "strided": (FactorizedConv2d, {"kernel_size": 3, "padding": 1, "stride": 2}, (7, 6)),
    "all padding": (FactorizedConv2d, {"kernel_size": (1, 2), "padding": (3, 4), "stride": 3}, (2, 2)),
    "one position": (FactorizedConv2d, {"kernel_size": 5, "padding": 2}, (1, 2)),
    "dilated": (FactorizedConv2d, {"kernel_size": (3, 2), "padding": 2, "stride": (1, 3), "dilation": 2}, (5, 8)),
    "channel": (FactorizedConv2d, {"kernel_size": 3, "padding": 1, "kind": "channel"}, (4, 5)),
    "grouped": (FactorizedConv2d, {"kernel_size": 3, "padding": 2, "groups": 2}, (4, 5)),
    "circular": (FactorizedConv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, (4, 5)),
    "1d": (FactorizedConv1d, {"kernel_size": 4, "padding": "same"}, (7,)),
    "3d": (FactorizedConv3d, {"kernel_size": (2, 3, 1), "padding": 1, "stride": (2, 1, 2)}, (3, 4, 5)),
}


def made(name: str, channels_last: bool = False) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    kind, settings, extents = CASES[name]
    layer = kind(4, 6, format=2, execution="products", init="kaiming", **settings).double()
    x = torch.randn(2, 4, *extents, dtype=torch.float64)
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    x = x.to(memory_format=formats[len(extents)]) if channels_last else x
    return layer, x.requires_grad_()


def twice_differentiated(layer: Any, x: Tensor) -> list[Tensor]:
    y = layer(x)
    tensors = [x, *layer.parameters()]
    first = torch.autograd.grad(y.sin().sum(), tensors, create_graph=True)
    return [y, *first, *torch.autograd.grad(sum(part.sin().sum() for part in first), tensors)]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize(
    ("name", "channels_last"),
    [(name, last) for name, (_, _, extents) in CASES.items() for last in (False, True)[: len(extents)]],
)
def test_shifts_in_place_and_their_two_gradients_are_those_of_slices(
    name: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = made(name, channels_last)
    in_place = twice_differentiated(layer, x)
    monkeypatch.setattr(shifted, "is_traced", lambda: True)
    for actual, expected in zip(in_place, twice_differentiated(layer, x), strict=True):
        assert error(actual, expected) < 1e-12


@pytest.mark.parametrize("row_dims", [0, 1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_derivatives_are_exact_in_both_directions(stride: int, row_dims: int) -> None:
    shape = KernelShape(6, 4, (3, 2), row_dims=row_dims)
    shifts = plan_shifts((5, 4), shape, Geometry((stride, stride), ((1, 1), (1, 0)), (1, 1)), dim=2, first_dim=3)
    stack = torch.randn(2, 1, prod(shape.column_size), 2, 5, 4, dtype=torch.float64, requires_grad=True)
    run = partial(shift_and_stack, shifts=shifts)
    assert torch.autograd.gradcheck(run, (stack,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (stack,))


def test_tangents_pass_without_a_gradient() -> None:
    layer, x = made("strided")
    tangent = torch.randn_like(x)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), tangent)
        y = torch.autograd.forward_ad.unpack_dual(layer(dual))
    layer.execution = "composed"
    expected = torch.func.jvp(layer, (x.detach(),), (tangent,))
    assert error(y.primal, expected[0]) < 1e-12
    assert error(y.tangent, expected[1]) < 1e-12


def test_gradients_of_single_examples_are_as_before() -> None:
    layer, x = made("same size")
    parameters = {name: value.detach() for name, value in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], example: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (example[None],)).sin().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x.detach())
    for place, example in enumerate(x.detach()):
        for name, expected in torch.func.grad(loss)(parameters, example).items():
            assert error(each[name][place], expected) < 1e-12


def test_a_training_step_pads_nothing_and_fills_no_gradient_of_a_slice() -> None:
    layer, x = made("same size")
    with torch.autograd.profiler.profile() as profile:
        layer(x).sum().backward()
    names = {event.name for event in profile.function_events}
    assert "aten::bmm" in names
    assert not names & {"aten::constant_pad_nd", "aten::slice_backward", "aten::unbind_backward"}


def test_an_input_that_is_smaller_than_the_kernel_is_named() -> None:
    layer, x = made("unpadded")
    with pytest.raises(ValueError, match=r"the kernel does not fit its input: \(3, 3\) .* padded input \(2, 5\)"):
        layer(x[:, :, :2])
