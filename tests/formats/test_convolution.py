from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from factorized.formats.convolution import Geometry, convolve, explicit_padding
from factorized.formats.format import WAYS, Way
from factorized.formats.kernel import KernelShape, to_kernel
from factorized.formats.product import Product

# The dense layers that the ways are held against warn so; the ways themselves pad beforehand.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

CONV: dict[int, type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@dataclass(frozen=True)
class Problem:
    """A dense layer, the factors of its kernel and an input."""

    dense: nn.Module
    shape: KernelShape
    geometry: Geometry
    x: Tensor
    U: Tensor
    V: Tensor
    inner: list[Tensor]
    bias: Tensor | None

    def run(self, way: Way) -> Tensor:
        product = Product(self.shape, self.U.shape[1], len(self.inner))
        return product.run(way, self.x, (self.U, *self.inner, self.V), self.bias, self.geometry)

    def run_dense(self) -> Tensor:
        """Run torch's own layer with the kernel that a plain chain of products per group gives."""
        g = self.shape.groups
        chains = []
        for parts in zip(*(factor.chunk(g) for factor in (self.U, *self.inner, self.V)), strict=True):
            chains.append(torch.linalg.multi_dot([*parts[:-1], parts[-1].mT]))
        parameters = {"weight": to_kernel(torch.stack(chains), self.shape).clone(memory_format=torch.contiguous_format)}
        if self.bias is not None:
            parameters["bias"] = self.bias
        return torch.func.functional_call(self.dense, parameters, (self.x,))

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.U, self.V, *self.inner, *([] if self.bias is None else [self.bias])]


def problem(
    channels: tuple[int, int],  # in, out
    kernel_size: Sequence[int],
    extents: Sequence[int],
    *,
    rank: int = 3,
    depth: int = 0,
    batch: int | None = 2,
    kind: str = "spatial",
    row_dims: int | None = None,
    layout: str = "first",
    bias: bool = True,
    **conv: Any,
) -> Problem:
    dims = len(kernel_size)
    dense = CONV[dims](*channels, tuple(kernel_size), bias=bias, device="meta", dtype=torch.float64, **conv)
    shape = KernelShape.of(dense.weight.shape, dense.groups, kind)
    if row_dims is not None:
        shape = KernelShape(shape.out_channels, shape.in_channels, shape.size, shape.groups, row_dims)
    padding = explicit_padding(dense.padding, dense.kernel_size, dense.dilation)
    geometry = Geometry(dense.stride, padding, dense.dilation, dense.padding_mode)
    generator = torch.Generator().manual_seed(0)

    def leaf(*extents: int) -> Tensor:
        return torch.randn(extents, generator=generator, dtype=torch.float64)

    x = leaf(1 if batch is None else batch, channels[0], *extents)
    if layout == "last":
        x = x.contiguous(memory_format=LAST[dims])
    if batch is None:
        x = x.squeeze(0)
    U, V = leaf(shape.groups * shape.rows, rank), leaf(shape.groups * shape.columns, rank)
    inner = [leaf(shape.groups * rank, rank) for _ in range(depth)]
    made = Problem(dense, shape, geometry, x, U, V, inner, leaf(channels[1]) if bias else None)
    for tensor in made.leaves:
        tensor.requires_grad_()
    return made


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    largest = expected.abs().max().clamp(min=1).item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * largest)


def gradients(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)  # no two outputs weigh the same
    return torch.autograd.grad((y * weights).sum(), leaves)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dims = draw(st.integers(1, 3))

    def per_dim(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel_size, dilation, groups = per_dim(1, 4), per_dim(1, 2), draw(st.integers(1, 2))
    mode = draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    padding = draw(st.sampled_from(["same", "valid", None]))
    batch = draw(st.sampled_from([None, 1, 2]))
    # Extents exceed the reach of a kernel, so that all modes can pad and all kernels fit.
    reach = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
    return problem(
        (groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))),
        kernel_size,
        tuple(r + extra for r, extra in zip(reach, per_dim(3, 4), strict=True)),
        stride=1 if padding == "same" else per_dim(1, 3),
        padding=padding or per_dim(0, 2),
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
        rank=draw(st.integers(1, 3)),
        depth=draw(st.integers(0, 2)),
        batch=batch,
        row_dims=draw(st.integers(0, dims)),
        layout=draw(st.sampled_from(["first", "last"])) if dims > 1 and batch else "first",
        bias=draw(st.booleans()),
    )


@settings(max_examples=150)
@given(made=problems())
def test_every_way_equals_torchs_layer_on_drawn_geometries(made: Problem) -> None:
    expected = made.run_dense()
    reference = gradients(expected, made.leaves)
    for way in WAYS:
        y = made.run(way)
        assert_same(y, expected)
        for actual, wanted in zip(gradients(y, made.leaves), reference, strict=True):
            assert_same(actual, wanted)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize(
    ("kernel_size", "extents", "stride"),
    [((3, 2), (6, 7), (1, 1)), ((1, 1), (6, 7), (2, 2)), ((2, 3, 2), (4, 5, 6), (1, 2, 1))],
)
def test_products_keep_the_layout_of_their_input(
    kernel_size: tuple[int, ...], extents: tuple[int, ...], stride: tuple[int, ...], mode: str
) -> None:
    options: dict[str, Any] = {"stride": stride, "padding": [int(k > 1) for k in kernel_size], "padding_mode": mode}
    last = LAST[len(extents)]
    y = problem((4, 5), kernel_size, extents, layout="last", **options).run("products")
    assert y.is_contiguous(memory_format=last)
    assert not y.is_contiguous()
    y = problem((4, 5), kernel_size, extents, **options).run("products")
    assert y.is_contiguous()
    assert not y.is_contiguous(memory_format=last)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kernel_size", "extents"), [((4,), (2,)), ((3, 3), (2, 5)), ((3, 3), (5, 2)), ((2, 3, 2), (4, 2, 4))]
)
def test_a_kernel_that_does_not_fit_its_input_is_refused(
    kernel_size: tuple[int, ...], extents: tuple[int, ...], way: Way
) -> None:
    made = problem((4, 5), kernel_size, extents)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)kernel"):
        made.run(way)


def test_positions_that_a_strided_pointwise_kernel_never_reads_do_not_matter() -> None:
    made = problem((4, 5), (1, 1), (5, 6), stride=2)
    with torch.no_grad():
        made.x[..., 1::2, :] = made.x[..., 1::2] = float("nan")
    y = made.run("products")
    assert all(tensor.isfinite().all() for tensor in (y, *gradients(y, made.leaves)))


class Copies(TorchDispatchMode):
    """Lists the layouts of all copies that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: list[torch.memory_format] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.clone.default:
            self.layouts.append((kwargs or {}).get("memory_format", torch.preserve_format))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("learns", [False, True])
def test_a_kernel_is_copied_into_the_layout_of_the_input_where_torch_would_not_do_it(
    layout: torch.memory_format, learns: bool
) -> None:
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64).to(memory_format=layout)  # type: ignore[call-overload]
    view = torch.randn(3, 3, 3, 4, dtype=torch.float64, requires_grad=True).movedim(-1, 0)  # (out, in, height, width)
    with torch.set_grad_enabled(learns), Copies() as copies:
        y = convolve(x, view, None, Geometry((1, 1), ((1, 1), (1, 1)), (1, 1)), 1)
    assert copies.layouts == [layout] * (learns or layout is torch.contiguous_format)
    expected = nn.functional.conv2d(x, view.contiguous(), padding=1)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)
    if learns:
        wanted = torch.autograd.grad(nn.functional.conv2d(x, view.contiguous(), padding=1).square().sum(), view)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), view), wanted)


@pytest.mark.parametrize(("size", "strides"), [((3, 1), (24, 1, 8, 1)), ((1, 3), (24, 1, 5, 8))])
def test_the_stride_of_a_dimension_with_one_entry_does_not_matter(
    size: tuple[int, int], strides: tuple[int, ...]
) -> None:
    x = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(4, 8, *size).as_strided((4, 8, *size), strides)
    with torch.no_grad():
        y = convolve(x, kernel, None, Geometry((1, 1), ((0, 0), (0, 0)), (1, 1)), 2)
    expected = nn.functional.conv2d(x, kernel.clone(memory_format=torch.contiguous_format), groups=2)
    torch.testing.assert_close(y, expected)


def test_kernels_of_several_models_are_differentiated_together_with_channels_last() -> None:
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    kernels = torch.randn(6, 4, 3, 3, 3, dtype=torch.float64)

    def loss(kernel: Tensor) -> Tensor:
        return convolve(x, kernel, None, Geometry((1, 1), ((1, 1), (1, 1)), (1, 1)), 1).square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(kernels)
    torch.testing.assert_close(together, torch.stack([torch.func.grad(loss)(kernel) for kernel in kernels]))


class Strides(TorchDispatchMode):
    """Notes the strides of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def __torch_dispatch__(self, call: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if call is torch.ops.aten.convolution.default:
            self.seen.append(arguments[3])
        return call(*arguments, **(keywords or {}))


@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((1, 1), (2, 2)), ((0, 1), (0, 0))])
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
def test_strided_pointwise_kernels_that_learn_get_the_positions_they_read(
    padding: tuple[tuple[int, int], ...], mode: str
) -> None:
    """Torch's own backward pass writes past the end of memory: free(): invalid next size."""
    geometry = Geometry((2, 3), padding, (1, 1), mode)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    kernel = torch.randn(5, 3, 1, 1, dtype=torch.float64).requires_grad_()
    with Strides() as strides:
        y = convolve(x, kernel, None, geometry, 1)
    assert strides.seen == [[1, 1]]
    assert y.is_contiguous(memory_format=torch.channels_last)
    expected = convolve(x.detach().contiguous(), kernel.detach(), None, geometry, 1)
    torch.testing.assert_close(y, expected)
    with Strides() as strides, torch.no_grad():
        torch.testing.assert_close(convolve(x, kernel, None, geometry, 1), expected)
    assert strides.seen == [[2, 3]]


def test_compiled_strided_pointwise_kernels_keep_the_layout_of_their_input() -> None:
    geometry = Geometry((2, 2), ((0, 0), (0, 0)), (1, 1))
    x = torch.randn(2, 16, 9, 8).to(memory_format=torch.channels_last).requires_grad_()
    kernel = torch.randn(32, 16, 1, 1).requires_grad_()
    y = torch.compile(convolve, fullgraph=True)(x, kernel, None, geometry, 1)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_an_input_without_a_batch_has_no_layout_of_its_own() -> None:
    x = torch.randn(2, 3, 3, 4, dtype=torch.float64).movedim(-1, 1)  # (in, depth, …) looks like images, channels last
    kernel = torch.randn(3, 2, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    y = convolve(x, kernel, None, Geometry((1, 1, 1), ((0, 0),) * 3, (1, 1, 1)), 1)
    torch.testing.assert_close(y, nn.functional.conv3d(x, kernel))
