from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from factorized.formats.kernel import (
    KernelShape,
    column_kernel,
    grouped,
    inner_kernel,
    row_kernel,
    to_kernel,
    to_matrix,
)
from factorized.formats.product import Product

CONVOLVE = {0: F.linear, 1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def kernel_shapes(draw: st.DrawFn, dims: tuple[int, int] = (0, 3), groups: tuple[int, int] = (1, 3)) -> KernelShape:
    """Any split of any small kernel, also those that no ``kind`` asks for."""
    g = draw(st.integers(*groups))
    size = draw(st.lists(st.integers(1, 3), min_size=dims[0], max_size=dims[1]))
    return KernelShape(
        out_channels=g * draw(st.integers(1, 3)),
        in_channels=g * draw(st.integers(1, 3)),
        size=tuple(size),
        groups=g,
        row_dims=draw(st.integers(0, len(size))),
    )


@settings(max_examples=80)
@given(
    size=st.lists(st.integers(1, 4), max_size=3),
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    kind=st.sampled_from(["spatial", "channel"]),
)
def test_a_kernel_survives_the_way_to_its_matrix_and_back(
    size: list[int], groups: int, channels: tuple[int, int], kind: str
) -> None:
    kernel = normal(groups * channels[0], channels[1], *size)
    shape = KernelShape.of(kernel.shape, groups, kind)
    matrix = to_matrix(kernel, shape)
    assert shape.weight_shape == kernel.shape
    assert matrix.shape == (groups, shape.rows, shape.columns)
    assert torch.equal(to_kernel(matrix, shape), kernel)


@settings(max_examples=40)
@given(shape=kernel_shapes())
def test_a_matrix_survives_the_way_to_its_kernel_and_back_for_any_split(shape: KernelShape) -> None:
    matrix = normal(shape.groups, shape.rows, shape.columns)
    assert torch.equal(to_matrix(to_kernel(matrix, shape), shape), matrix)


def test_the_spatial_matrix_of_two_dimensions_is_the_papers() -> None:
    o, i, kh, kw = 4, 3, 2, 5
    kernel = normal(o, i, kh, kw)
    expected = kernel.permute(0, 2, 1, 3).reshape(o * kh, i * kw)
    assert torch.equal(to_matrix(kernel, KernelShape.of(kernel.shape)), expected[None])


def test_the_channel_matrix_keeps_all_taps_in_its_columns() -> None:
    kernel = normal(4, 3, 2, 5)
    assert torch.equal(to_matrix(kernel, KernelShape.of(kernel.shape, kind="channel")), kernel.reshape(1, 4, 30))


def test_the_spatial_matrix_of_three_dimensions_gives_time_to_the_rows() -> None:
    kernel = normal(4, 3, 2, 5, 6)
    expected = kernel.permute(0, 2, 1, 3, 4).reshape(1, 8, 90)
    assert torch.equal(to_matrix(kernel, KernelShape.of(kernel.shape)), expected)


@pytest.mark.parametrize("weight_shape", [(6, 5), (6, 2, 3), (6, 2, 3, 4), (6, 2, 3, 2, 4)])
@pytest.mark.parametrize("kind", ["spatial", "channel"])
def test_each_group_has_the_matrix_of_its_own_output_channels(weight_shape: tuple[int, ...], kind: str) -> None:
    kernel = normal(*weight_shape)
    matrices = to_matrix(kernel, KernelShape.of(weight_shape, 3, kind))
    for matrix, part in zip(matrices, kernel.chunk(3), strict=True):
        assert torch.equal(matrix, to_matrix(part, KernelShape.of(part.shape, 1, kind))[0])


def test_a_kernel_entry_is_a_product_of_the_rows_that_its_channels_and_taps_name() -> None:
    groups, out, in_, kh, kw, rank = 2, 2, 3, 3, 2, 4
    shape = KernelShape.of((groups * out, in_, kh, kw), groups)
    U, V = normal(groups * shape.rows, rank), normal(groups * shape.columns, rank, seed=1)
    kernel = to_kernel(grouped(U, groups) @ grouped(V, groups).mT, shape)
    for o, i, a, b in product(range(groups * out), range(in_), range(kh), range(kw)):
        input_channel = o // out * in_ + i
        expected = U[o * kh + a] @ V[input_channel * kw + b]
        torch.testing.assert_close(kernel[o, i, a, b], expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(shape=kernel_shapes(dims=(1, 3)), rank=st.integers(1, 3), depth=st.integers(0, 2))
def test_convolving_by_factors_equals_convolving_by_the_composed_kernel(
    shape: KernelShape, rank: int, depth: int
) -> None:
    g, dims = shape.groups, len(shape.size)
    U, V = normal(g * shape.rows, rank), normal(g * shape.columns, rank, seed=1)
    inner = [normal(g * rank, rank, seed=2 + j) for j in range(depth)]
    chain = grouped(U, g)
    for M in inner:
        chain = chain @ grouped(M, g)
    x = normal(2, shape.in_channels, *(k + 2 for k in shape.size), seed=9)
    expected = CONVOLVE[dims](x, to_kernel(chain @ grouped(V, g).mT, shape), groups=g)

    y = CONVOLVE[dims](x, column_kernel(V, shape), groups=g)
    for M in reversed(inner):
        y = CONVOLVE[dims](y, inner_kernel(M, shape), groups=g)
    y = CONVOLVE[dims](y, row_kernel(U, shape), groups=g)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)


def test_without_spatial_dimensions_the_kernels_are_those_of_linear_layers() -> None:
    shape = KernelShape.of((5, 4))
    U, V, M, x = normal(5, 3), normal(4, 3, seed=1), normal(3, 3, seed=2), normal(7, 4, seed=3)
    y = F.linear(F.linear(F.linear(x, column_kernel(V, shape)), inner_kernel(M, shape)), row_kernel(U, shape))
    torch.testing.assert_close(y, x @ (U @ M @ V.mT).mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("weight_shape", "groups", "kind", "rows", "columns", "full_rank", "numel"),
    [
        ((10, 20), 1, "spatial", 10, 20, 10, 200),
        ((10, 20), 1, "channel", 10, 20, 10, 200),
        ((6, 4, 5), 1, "spatial", 6, 20, 6, 120),
        ((64, 64, 3, 3), 1, "spatial", 192, 192, 192, 36_864),
        ((64, 64, 3, 3), 1, "channel", 64, 576, 64, 36_864),
        ((16, 2, 7, 1), 1, "spatial", 112, 2, 2, 224),
        ((8, 2, 3, 5), 4, "spatial", 6, 10, 6, 240),
        ((8, 1, 3, 3), 8, "spatial", 3, 3, 3, 72),
        ((4, 3, 2, 3, 5), 1, "spatial", 8, 45, 8, 360),
        ((4, 3, 2, 3, 5), 2, "channel", 2, 90, 2, 360),
    ],
)
def test_the_shape_counts_rows_columns_and_entries(
    weight_shape: tuple[int, ...], groups: int, kind: str, rows: int, columns: int, full_rank: int, numel: int
) -> None:
    shape = KernelShape.of(weight_shape, groups, kind)
    assert (shape.rows, shape.columns, shape.full_rank, shape.numel) == (rows, columns, full_rank, numel)
    assert (shape.out_channels, shape.in_channels) == (weight_shape[0], weight_shape[1] * groups)
    assert str(shape) == "x".join(map(str, weight_shape))


@pytest.mark.parametrize(
    ("weight_shape", "groups", "rank", "depth", "entries"),
    [
        ((10, 20), 1, 3, 0, 90),
        ((10, 20), 1, 3, 2, 108),
        ((64, 64, 3, 3), 1, 10, 0, 3_840),
        ((64, 64, 3, 3), 1, 10, 1, 3_940),
        ((8, 2, 3, 5), 4, 2, 0, 128),
        ((8, 2, 3, 5), 4, 2, 2, 160),
    ],
)
def test_the_factors_have_the_entries_that_a_hand_counts(
    weight_shape: tuple[int, ...], groups: int, rank: int, depth: int, entries: int
) -> None:
    assert Product(KernelShape.of(weight_shape, groups), rank, depth).numel == entries


@pytest.mark.parametrize("kind", ["depth", "Spatial", "", None])
def test_a_wrong_kind_says_which_ones_there_are(kind: str | None) -> None:
    with pytest.raises(ValueError, match=f'kind must be one of "spatial", "channel", got {kind!r}'):
        KernelShape.of((4, 4, 3, 3), kind=kind)


@pytest.mark.parametrize("shape", [(4, -4), (0, 4), (8, 8, 0, 3)])
def test_a_weight_without_rows_or_columns_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"every size of a weight must be at least 1, got \("):
        KernelShape.of(shape)
