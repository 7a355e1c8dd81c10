from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from factorized import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d
from tests.contract import Case, LayerContract, error, gradients

# The dense layers that ours are held against warn so.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

DENSE: dict[int, type[Any]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FACTORIZED: dict[int, type[Any]] = {1: FactorizedConv1d, 2: FactorizedConv2d, 3: FactorizedConv3d}
LAST = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
KINDS = ("spatial", "channel")
EXECUTIONS = ("two_convs", "one_conv", "two_products", "auto")
# A setting: channels in and out, kernel size, spatial extents, rank, depth, and what else torch's layer is given.
Setting = tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], int, int, dict[str, Any]]
SETTINGS: dict[str, Setting] = {
    "1d": ((4, 5), (3,), (9,), 3, 0, {"padding": 1}),
    "1d-strided": ((4, 5), (3,), (17,), 3, 1, {"stride": 3, "dilation": 2, "padding": 2}),
    "1d-reflect": ((4, 5), (4,), (9,), 2, 2, {"padding": "same", "padding_mode": "reflect"}),
    "1d-groups": ((4, 6), (3,), (9,), 2, 1, {"groups": 2, "bias": False}),
    "2d": ((4, 5), (3, 3), (6, 7), 4, 0, {"padding": 1}),
    "2d-unequal": ((4, 5), (3, 2), (9, 8), 3, 1, {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2)}),
    "2d-same": ((4, 5), (2, 4), (6, 7), 3, 0, {"padding": "same"}),
    "2d-circular": ((4, 5), (3, 4), (6, 7), 3, 2, {"padding": "same", "padding_mode": "circular", "dilation": (2, 1)}),
    "2d-valid": ((4, 5), (3, 2), (6, 7), 3, 0, {"padding": "valid", "stride": 2, "bias": False}),
    "2d-reflect": ((4, 5), (3, 5), (6, 7), 3, 1, {"padding": (1, 2), "padding_mode": "reflect"}),
    "2d-groups": ((6, 4), (3, 2), (6, 7), 2, 2, {"groups": 2, "padding": 1, "padding_mode": "replicate"}),
    "2d-depthwise": ((4, 8), (3, 3), (6, 7), 2, 0, {"groups": 4, "padding": 1, "stride": (1, 2)}),
    "2d-pointwise": ((4, 5), (1, 1), (6, 7), 3, 1, {"stride": (2, 1)}),
    "2d-overcomplete": ((2, 3), (3, 3), (6, 7), 12, 1, {"padding": 1, "bias": False}),
    "3d": ((4, 5), (2, 3, 2), (4, 5, 6), 4, 1, {"stride": (1, 2, 1), "padding": (1, 0, 1)}),
    "3d-groups": ((4, 6), (3, 1, 2), (4, 5, 6), 2, 0, {"groups": 2, "padding": 1, "padding_mode": "circular"}),
    "3d-replicate": ((3, 4), (2, 2, 3), (4, 5, 6), 3, 0, {"padding": "same", "padding_mode": "replicate"}),
}
CHANNELS_LAST = {"2d", "2d-circular", "3d"}
THOROUGH = {
    "1d-strided-two_convs-channel",
    "2d-two_convs-spatial",
    "2d-two_products-spatial-last",
    "2d-unequal-two_products-channel",
    "2d-circular-one_conv-spatial",
    "2d-groups-two_products-spatial",
    "3d-two_convs-spatial",
}
INDUCTOR = {"2d-two_products-spatial-last"}


def case(setting: str, execution: str, kind: str, layout: str = "first") -> Case:
    (inputs, outputs), kernel_size, extents, rank, depth, conv = SETTINGS[setting]
    dims = len(kernel_size)

    def make_input(leading: tuple[int, ...]) -> Tensor:
        x = torch.randn(*leading, inputs, *extents)
        return x.contiguous(memory_format=LAST[dims]) if layout == "last" and leading else x

    name = "-".join([setting, execution, kind, *(["last"] if layout == "last" else [])])
    return Case(
        name,
        FACTORIZED[dims],
        partial(DENSE[dims], inputs, outputs, kernel_size, **conv),
        rank,
        make_input,
        {"depth": depth, "execution": execution, "kind": kind},
        thorough=name in THOROUGH,
        inductor=name in INDUCTOR,
    )


def cases(dims: str) -> tuple[Case, ...]:
    """Return a case per setting and execution, of either kind in turn, and some that choose or have channels last."""
    chosen = [setting for setting in SETTINGS if setting.startswith(dims)]
    made = [case(dims, "auto", "spatial")]
    for n, setting in enumerate(chosen):
        made += [case(setting, execution, KINDS[(n + m) % 2]) for m, execution in enumerate(EXECUTIONS[:3])]
        if setting in CHANNELS_LAST:
            made += [case(setting, execution, "spatial", "last") for execution in EXECUTIONS[:3]]
    return tuple(made)


class TestConv(LayerContract):
    cases = (*cases("1d"), *cases("2d"), *cases("3d"))


def test_every_case_to_be_looked_at_thoroughly_exists() -> None:
    assert {made.name for made in TestConv.cases if made.thorough} == THOROUGH
    assert {made.name for made in TestConv.cases if made.inductor} == INDUCTOR


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_runs_alike_in_every_execution_kind_and_layout(
    setting: str, execution: str, kind: str, layout: str
) -> None:
    made = case(setting, execution, kind, layout)
    layer, x = made.make_layer(), made.make_input(3)
    dense = layer.to_dense()
    assert error(layer(x), dense(x)) < 1e-12
    assert error(*(gradients(module, x, [x])[0] for module in (layer, dense))) < 1e-11


@st.composite
def drawn_layers(draw: st.DrawFn) -> tuple[Any, Tensor]:
    """Draw a layer of any settings and an input that fits it."""
    dims = draw(st.integers(1, 3))

    def per_dim(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel_size, dilation, groups = per_dim(1, 4), per_dim(1, 2), draw(st.integers(1, 2))
    padding = draw(st.sampled_from(["same", "valid", None]))
    layer = FACTORIZED[dims](
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
        kernel_size,
        draw(st.integers(1, 4)),
        stride=1 if padding == "same" else per_dim(1, 3),
        padding=padding or per_dim(0, 2),
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])),
        kind=draw(st.sampled_from(["spatial", "channel"])),
        depth=draw(st.integers(0, 2)),
        execution=draw(st.sampled_from(EXECUTIONS)),
        init=partial(nn.init.normal_, generator=torch.Generator().manual_seed(0)),
        dtype=torch.float64,
    )
    # Extents exceed the reach of a kernel, so that all modes can pad and all kernels fit.
    reach = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
    leading = draw(st.sampled_from([(), (1,), (2,)]))
    extents = [r + extra for r, extra in zip(reach, per_dim(3, 4), strict=True)]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*leading, layer.in_channels, *extents, generator=generator, dtype=torch.float64)
    return layer, x.requires_grad_()


@settings(deadline=None, max_examples=60)
@given(drawn=drawn_layers())
def test_layers_of_any_settings_compute_what_their_dense_layers_do(drawn: tuple[Any, Tensor]) -> None:
    layer, x = drawn
    dense = layer.to_dense()
    assert error(layer(x), dense(x)) < 1e-11
    assert error(*(gradients(module, x, [x])[0] for module in (layer, dense))) < 1e-11


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_an_empty_batch_gives_an_empty_output(execution: str) -> None:
    layer = FactorizedConv2d(4, 6, 3, 2, padding=1, execution=execution)
    assert layer(torch.randn(0, 4, 5, 5)).shape == (0, 6, 5, 5)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_channels_last_inputs_give_channels_last_outputs(execution: str) -> None:
    layer = FactorizedConv2d(4, 6, 3, 2, padding=1, execution=execution)
    y = layer(torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (3, 5, 5), (4, 5), (2, 4, 5, 5, 5)])
def test_inputs_that_the_dense_layer_refuses_are_refused(shape: tuple[int, ...], execution: str) -> None:
    layer = FactorizedConv2d(4, 6, 3, 2, execution=execution)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)expected|multiplied|size"):
        layer(torch.randn(shape))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_an_exported_program_takes_images_of_another_size(execution: str) -> None:
    layer = FactorizedConv2d(4, 6, 3, 2, stride=2, padding=1, execution=execution, dtype=torch.float64)
    x, other = (torch.randn(2, 4, *extents, dtype=torch.float64) for extents in ((9, 8), (12, 11)))
    sizes = ({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(layer, (x,), dynamic_shapes=sizes).module()
    assert error(program(other), layer(other)) < 1e-12
