"""Kernels that lie in memory as transposed convolutions read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from factorized import FactorizedConv2d
from factorized.formats import convolution
from factorized.formats.convolution import CHANNELS_LAST, Geometry, convolve

CONV: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}


def view_of_V(out: int, inputs: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a kernel (out, in, *size) as a product has it in memory: the outputs of a tap side by side."""
    return torch.randn(inputs, *size, out, dtype=dtype).movedim(-1, 0)


@pytest.fixture
def transposed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The kernels that transposed convolutions get; views of any size are worth it."""
    given: list[Tensor] = []

    def noted(dims: int) -> Any:
        apply = convolution._TRANSPOSED[dims]

        def call(x: Tensor, kernel: Tensor, *settings: Any) -> Tensor:
            given.append(kernel)
            return apply(x, kernel, *settings)

        return call

    monkeypatch.setattr(convolution, "LARGE_KERNEL", 0)
    monkeypatch.setattr(convolution, "_TRANSPOSED", {dims: noted(dims) for dims in (2, 3)})
    return given


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "padding", "dilation"),
    [
        ((1, 3), (0, 1), (1, 1)),
        ((1, 3), (0, 0), (1, 2)),
        ((4, 3), (2, 1), (1, 2)),
        ((3, 1), (2, 0), (1, 3)),
        ((1, 1), (0, 0), (1, 1)),
        ((2, 1, 3), (1, 0, 2), (1, 1, 1)),
    ],
)
def test_a_view_of_a_factor_is_read_where_it_lies_without_gradients_and_channels_last(
    size: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    batch: int,
    bias: bool,
    transposed: list[Tensor],
) -> None:
    dims = len(size)
    x = torch.randn(batch, 8, *(5, 7, 6)[:dims]).contiguous(memory_format=CHANNELS_LAST[2 + dims])
    kernel, b = view_of_V(64, 8, *size), torch.randn(64) if bias else None
    geometry = Geometry((1,) * dims, tuple((p, p) for p in padding), dilation)
    dense = CONV[dims](8, 64, size, padding=padding, dilation=dilation, bias=bias)
    with torch.no_grad():
        dense.weight.copy_(kernel)
        if b is not None and dense.bias is not None:
            dense.bias.copy_(b)
        y, expected = convolve(x, kernel, b, geometry, 1), dense(x)
    mirrors = x.numel() < kernel.numel() or max(size) == 1
    assert [given.data_ptr() for given in transposed] == [kernel.data_ptr()] * mirrors
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": Geometry((1, 2), ((0, 0), (1, 1)), (1, 1))},
        {"geometry": Geometry((1, 1), ((1, 1), (1, 1)), (1, 1))},  # more padding than the taps reach
        {"geometry": Geometry((1, 1), ((0, 0), (3, 3)), (1, 1))},
        {"x": torch.randn(1, 8, 4, 4)},
        {"x": torch.randn(4, 8, 8, 8).contiguous(memory_format=torch.channels_last)},  # more entries than the kernel
        {"x": torch.randn(8, 4, 4)},
        {"kernel": torch.randn(64, 8, 1, 3).contiguous(memory_format=torch.channels_last)},
        {"kernel": view_of_V(64, 8, 1, 3).requires_grad_()},
        {"kernel": view_of_V(64, 4, 1, 3), "groups": 2},
        {"kernel": view_of_V(64, 8, 1, 3, dtype=torch.float64)},
        {"large": 10**4},
    ],
    ids=["strided", "padded", "wide", "first", "many", "alone", "dense", "learns", "groups", "double", "small"],
)
def test_other_kernels_are_not_read_by_transposed_convolutions(
    change: dict[str, Any], transposed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = change.get("kernel", view_of_V(64, 8, 1, 3))
    x = change.get("x", torch.randn(1, 8, 4, 4).contiguous(memory_format=torch.channels_last)).to(kernel.dtype)
    geometry = change.get("geometry", Geometry((1, 1), ((0, 0), (1, 1)), (1, 1)))
    monkeypatch.setattr(convolution, "LARGE_KERNEL", change.get("large", 0))
    y = convolve(x, kernel, None, geometry, change.get("groups", 1))
    assert not transposed
    padding = [before for before, _ in geometry.padding]
    wanted = nn.functional.conv2d(
        x, kernel.detach().contiguous(), None, geometry.stride, padding, groups=change.get("groups", 1)
    )
    torch.testing.assert_close(y.detach(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 7, 4, 4), (1, 8, 4, 2)], ids=["channels", "extent"])
def test_an_input_that_does_not_fit_a_view_of_a_factor_raises_what_torch_does(
    shape: tuple[int, ...], transposed: list[Tensor]
) -> None:
    x, kernel = torch.randn(shape).contiguous(memory_format=torch.channels_last), view_of_V(64, 8, 1, 3)
    geometry = Geometry((1, 1), ((0, 0), (0, 0)), (1, 1))
    with torch.no_grad(), pytest.raises(RuntimeError) as expected:
        nn.functional.conv2d(x, kernel)
    with torch.no_grad(), pytest.raises(RuntimeError) as raised:
        convolve(x, kernel, None, geometry, 1)
    assert str(raised.value) == str(expected.value)


def test_a_layer_reads_values_that_were_written_behind_its_back() -> None:
    layer = FactorizedConv2d(256, 256, 3, 37, padding=1, bias=False, init="kaiming").eval()
    x = torch.randn(1, 256, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        y = layer(x)
        layer.V.data.copy_(2 * layer.V)
        torch.testing.assert_close(layer(x), 2 * y, rtol=1e-4, atol=1e-4)
        layer.V.data = layer.V.data / 2
        torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(y, layer.to_dense()(x), rtol=1e-4, atol=1e-4)


def test_compiled_code_needs_no_guard_on_the_batch() -> None:
    layer = FactorizedConv2d(256, 256, 3, 37, padding=1, init="kaiming").eval()
    torch._dynamo.reset()
    counter = CompileCounter()
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch in (2, 9):
            x = torch.randn(batch, 256, 6, 7).contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
