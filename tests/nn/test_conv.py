from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from factorized import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d, LowRank, Monarch, TensorTrain, Tucker
from factorized.formats.format import Format
from factorized.formats.kernel import KernelShape
from factorized.formats.product import Product
from factorized.formats.scheme import Scheme
from factorized.testing import error, gradients

# The dense layers that ours are held against warn so.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

FACTORIZED: dict[int, type[Any]] = {1: FactorizedConv1d, 2: FactorizedConv2d, 3: FactorizedConv3d}
POINT = KernelShape.of((6, 4, 1, 1))
EXECUTIONS = ("composed", "chain", "products", "auto")
SCHEMES: dict[str, Scheme] = {
    "spatial": LowRank(),
    "channel": LowRank("channel"),
    "train": TensorTrain(),
    "tucker": Tucker(),
    "separable-train": TensorTrain(separable=True),
    "separable-tucker": Tucker(separable=True),
    "monarch": Monarch(),
}


@st.composite
def drawn_layers(draw: st.DrawFn) -> tuple[Any, Tensor]:
    """Draw a layer of any settings and an input that fits it."""
    dims = draw(st.integers(1, 3))

    def per_dim(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel_size, dilation, groups = per_dim(1, 4), per_dim(1, 2), draw(st.integers(1, 2))
    padding = draw(st.sampled_from(["same", "valid", None]))
    inputs, outputs = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 4))
    weight = (outputs, inputs // groups, *kernel_size)
    separable = groups == 1 and prod(kernel_size) > 1
    kind = draw(st.sampled_from([kind for kind in SCHEMES if separable or not kind.startswith("separable")]))
    format = SCHEMES[kind].at_scale(SCHEMES[kind].kernel(weight, groups), draw(st.sampled_from([0.1, 0.4, 1])))
    if kind == "spatial":
        format = Product(format.shape, draw(st.integers(1, 4)), draw(st.integers(0, 2)))
    layer = FACTORIZED[dims](
        inputs,
        outputs,
        kernel_size,
        format,
        stride=1 if padding == "same" else per_dim(1, 3),
        padding=padding or per_dim(0, 2),
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])),
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


@settings(max_examples=120)
@given(drawn=drawn_layers())
def test_layers_of_any_settings_compute_what_their_dense_layers_do(drawn: tuple[Any, Tensor]) -> None:
    layer, x = drawn
    dense = layer.to_dense()
    for execution in layer.executions:
        layer.execution = execution
        assert error(layer(x), dense(x)) < 1e-11
        assert error(*(gradients(module, x, [x])[0] for module in (layer, dense))) < 1e-11


def layer_of(scheme: Scheme, **settings: Any) -> FactorizedConv2d:
    return FactorizedConv2d(4, 6, 3, scheme.at_rank(scheme.kernel((6, 4, 3, 3)), 2), padding=1, **settings)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_an_empty_batch_gives_an_empty_output(scheme: Scheme) -> None:
    layer = layer_of(scheme)
    for execution in layer.executions:
        layer.execution = execution
        assert layer(torch.randn(0, 4, 5, 5)).shape == (0, 6, 5, 5)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_channels_last_inputs_give_channels_last_outputs(execution: str) -> None:
    layer = FactorizedConv2d(4, 6, 3, 2, padding=1, execution=execution)
    y = layer(torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("extents", [(5, 5), (1, 1)])
@pytest.mark.parametrize(("format", "groups"), [(Monarch(2).at_rank(POINT, 1), 1), (2, 1), (2, 2)])
def test_pointwise_outputs_keep_the_layout_of_inputs(
    format: Format | int, groups: int, extents: tuple[int, int], layout: torch.memory_format, learns: bool
) -> None:
    x = torch.randn(2, 4, *extents).contiguous(memory_format=layout)
    dense = nn.Conv2d(4, 6, 1, padding=1, groups=groups)
    layer = FactorizedConv2d.from_dense(dense, format)
    for execution in layer.executions:
        layer.execution = execution
        with torch.set_grad_enabled(learns):
            y = layer(x)
        assert y.stride() == dense(x).stride(), execution


@pytest.mark.parametrize("learns", [False, True])
def test_a_compiled_grouped_kernel_is_read_as_it_is_with_channels_last(learns: bool) -> None:
    layer = FactorizedConv2d(16, 8, (3, 1), 2, groups=2, execution="composed")
    x = torch.randn(3, 16, 9, 9).contiguous(memory_format=torch.channels_last)
    torch.compiler.reset()
    with torch.set_grad_enabled(learns):
        y = torch.compile(layer, fullgraph=True)(x)
    assert error(y, layer.to_dense()(x)) < 1e-5
    assert y.is_contiguous(memory_format=torch.channels_last)


SHAPES = {"3x3": ((6, 4, 3, 3), 1), "1x1": ((6, 4, 1, 1), 0), "3x1": ((6, 4, 3, 1), 1), "1d": ((6, 4, 3), 1)}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n in SCHEMES for s in SHAPES if s == "3x3" or not n.startswith("separable")]
)
def test_an_output_is_laid_out_as_that_of_the_dense_layer(name: str, shape: str, learns: bool) -> None:
    (out, channels, *size), padding = SHAPES[shape]
    format = SCHEMES[name].at_scale(SCHEMES[name].kernel((out, channels, *size)), 0.4)
    x = torch.randn(2, channels, *(5,) * len(size))
    dense = (nn.Conv1d, nn.Conv2d)[len(size) - 1](channels, out, tuple(size), padding=padding)
    layer = FACTORIZED[len(size)].from_dense(dense, format)
    for execution in layer.executions:
        layer.execution = execution
        with torch.set_grad_enabled(learns):
            y = layer(x)
        assert y.stride() == dense(x).stride(), execution  # so that y.view(len(y), -1) works, as before


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (3, 5, 5), (4, 5), (2, 4, 5, 5, 5)])
def test_inputs_that_the_dense_layer_refuses_are_refused(shape: tuple[int, ...], execution: str) -> None:
    layer = FactorizedConv2d(4, 6, 3, 2, execution=execution)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)expected|multiplied|size|dimensions"):
        layer(torch.randn(shape))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_an_exported_program_takes_images_of_another_size(scheme: Scheme) -> None:
    layer = layer_of(scheme, stride=2, dtype=torch.float64)
    x, other = (torch.randn(2, 4, *extents, dtype=torch.float64) for extents in ((9, 8), (12, 11)))
    sizes = ({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    for execution in layer.executions:
        layer.execution = execution
        program = torch.export.export(layer, (x,), dynamic_shapes=sizes).module()
        assert error(program(other), layer(other)) < 1e-12
