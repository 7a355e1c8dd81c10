"""The table of the contract: every layer in every format."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from math import gcd, prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.formats.format import Format, Rank
from factorized.formats.kernel import KernelShape
from factorized.formats.product import Product
from factorized.formats.scheme import Scheme
from factorized.testing import Case, LayerContract

# The dense layers that ours are held against warn so.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

How = Scheme | int  # a scheme, or the depth of a product
TRAIN, TUCKER, LOW, CHANNEL = fz.TensorTrain(), fz.Tucker(), fz.LowRank(), fz.LowRank("channel")


def formats(how: How, weight: tuple[int, ...], rank: Rank, groups: int = 1) -> tuple[Format, Format | None]:
    """Return the format of a case and, where one holds any weight, that of full rank."""
    if isinstance(how, int):
        shape = KernelShape.of(weight, groups)
        return Product(shape, rank, how), Product(shape, shape.full_rank, how)  # type: ignore[arg-type]
    shape = how.kernel(weight, groups)
    return how.at_rank(shape, rank), None if getattr(how, "separable", False) else how.at_scale(
        shape, 1000 if how.compresses else 1
    )


def linear(name: str, inputs: int, outputs: int, how: How, rank: Rank, bias: bool = True, **settings: Any) -> Case:
    format, full = formats(how, (outputs, inputs), rank)
    dense = partial(nn.Linear, inputs, outputs, bias)
    return Case(name, fz.FactorizedLinear, dense, format, partial(vectors, inputs), full, **settings)


def transposed(name: str, inputs: int, outputs: int, how: How, rank: Rank, **settings: Any) -> Case:
    format, full = formats(how, (inputs, outputs), rank)

    def dense() -> nn.Module:
        from transformers.pytorch_utils import Conv1D

        layer = Conv1D(outputs, inputs)
        nn.init.normal_(layer.weight)
        return layer

    options = {"transposed": True}
    return Case(name, fz.FactorizedLinear, dense, format, partial(vectors, inputs), full, options, **settings)


def vectors(inputs: int, leading: tuple[int, ...]) -> Tensor:
    return torch.randn(*leading, inputs)


LINEARS = (
    linear("wide", 12, 7, LOW, 3, thorough=True),
    linear("tall-no-bias", 5, 9, LOW, 2, bias=False),
    linear("one-by-one", 1, 1, LOW, 1),
    linear("overcomplete", 6, 8, fz.Overcomplete("wide"), 11, thorough=True),
    linear("one-inner", 8, 6, 1, 4),
    linear("two-inner", 6, 8, 2, 4, thorough=True),
    linear("two-inner-composed", 6, 8, 2, 4, options={"execution": "composed"}, thorough=True),
    linear("train", 12, 8, TRAIN, 2, thorough=True),
    linear("train-unequal-no-bias", 12, 8, TRAIN, (2, 3, 2), bias=False),
    linear("train-that-mixes-sides", 8, 6, fz.TensorTrain(dims=(4, 4, 3)), (3, 2)),
    linear("train-of-primes", 5, 7, TRAIN, 2),
    linear("train-of-a-matrix", 6, 8, fz.TensorTrain(dims=(8, 6)), 3),
    linear("train-near-full", 12, 8, TRAIN, (2, 6, 4), options={"execution": "composed"}, thorough=True),
    linear("tucker", 12, 8, TUCKER, 2, thorough=True),
    linear("tucker-unequal", 12, 8, TUCKER, (2, 3, 2, 3)),
    linear("tucker-three-to-one", 5, 24, fz.Tucker(dims=(2, 4, 3, 5)), (2, 2, 2, 3)),
    linear("tucker-near-full", 12, 8, TUCKER, (2, 3, 3, 4), options={"execution": "composed"}, thorough=True),
    linear("tucker-near-full-inside", 12, 8, fz.Tucker(dims=(2, 12, 4), core="train"), (2, 7, 4)),
    linear("tucker-refined", 12, 8, fz.Tucker(refinements=3), 2),
    linear("tucker-train-core", 12, 8, fz.Tucker(core="train"), (2, 3, 2, 2), thorough=True),
    linear("tucker-that-mixes-sides", 8, 6, fz.Tucker(dims=(4, 4, 3), core="train"), 2),
    linear("monarch", 12, 8, fz.Monarch(blocks=4), 2, thorough=True),
    linear("monarch-one-block-no-bias", 6, 9, fz.Monarch(blocks=1), 2, bias=False),
    linear("monarch-composed", 6, 9, fz.Monarch(blocks=3), 1, options={"execution": "composed"}),
    linear("kronecker", 12, 8, fz.Kronecker(), 3, thorough=True),
    linear("kronecker-given-no-bias", 12, 8, fz.Kronecker((4, 2)), 2, bias=False),
    linear("residual", 12, 7, fz.Residual(), 3, thorough=True),
    linear("residual-composed", 12, 7, fz.Residual(), 3, options={"execution": "composed"}, thorough=True),
    linear("residual-monarch-no-bias", 12, 8, fz.Residual(fz.Monarch(blocks=4)), 2, bias=False),
    transposed("transposed-residual", 12, 7, fz.Residual(), 3, thorough=True),
    transposed("transposed", 12, 7, LOW, 3, thorough=True),
    transposed("transposed-kronecker", 12, 8, fz.Kronecker(), 2),
    transposed("transposed-two-inner", 6, 8, 2, 4),
    transposed("transposed-train", 12, 8, TRAIN, 2),
    transposed("transposed-tucker", 12, 8, TUCKER, 2),
    transposed("transposed-monarch", 12, 8, fz.Monarch(blocks=2), 2, thorough=True),
)

ENTRIES, WIDTH = 9, 6


def indices(leading: tuple[int, ...]) -> Tensor:
    """Return indices among which are the padding of the cases, and entries that come more than once."""
    x = torch.randint(ENTRIES, (*leading, 8))
    x[..., :5] = torch.tensor([2, 2, 7, 7, 7])
    return x


def embedding(name: str, how: How, rank: Rank, thorough: bool = False, **settings: Any) -> Case:
    format, full = formats(how, (ENTRIES, WIDTH), rank)

    def dense() -> nn.Embedding:
        made = nn.Embedding(ENTRIES, WIDTH, **settings)
        nn.init.normal_(made.weight)  # the padding row too, as in a table that was loaded
        return made

    # torch cannot trace the gradient of a sparse table with padding, dense or not
    traceable = not (settings.get("sparse") and "padding_idx" in settings)
    return Case(name, fz.FactorizedEmbedding, dense, format, indices, full, thorough=thorough, compiles=traceable)


EMBEDDINGS = (
    embedding("table", LOW, 3, thorough=True),
    embedding("table-overcomplete", fz.Overcomplete("wide"), 11),
    embedding("table-padding", LOW, 3, thorough=True, padding_idx=2),
    embedding("table-negative-padding", 1, 3, padding_idx=-2),
    embedding("table-by-frequency", LOW, 3, scale_grad_by_freq=True),
    embedding("table-all", 2, 3, thorough=True, padding_idx=7, scale_grad_by_freq=True),
    embedding("table-sparse", LOW, 3, thorough=True, sparse=True),
    embedding("table-sparse-padding", 1, 3, sparse=True, padding_idx=2),
    embedding("table-train", TRAIN, 2, thorough=True),
    embedding("table-train-all", TRAIN, 2, padding_idx=7, scale_grad_by_freq=True),
    embedding("table-tucker", TUCKER, 2, thorough=True),
    embedding("table-tucker-padding", fz.Tucker(core="train"), 2, padding_idx=2),
    embedding("table-kronecker", fz.Kronecker(), 2, thorough=True),
    embedding("table-monarch", fz.Monarch(blocks=3), 1, thorough=True),
    embedding("table-residual", fz.Residual(), 3, thorough=True, padding_idx=2),
    embedding("table-monarch-all", fz.Monarch(blocks=3), 1, padding_idx=7, scale_grad_by_freq=True),
)


def bag(name: str, how: How, rank: Rank, thorough: bool = False, **settings: Any) -> Case:
    format, full = formats(how, (ENTRIES, WIDTH), rank)
    dense = partial(nn.EmbeddingBag, ENTRIES, WIDTH, **settings)

    def bags(leading: tuple[int, ...]) -> Tensor:  # without leading dimensions a bag would need offsets
        return indices(leading or (1,))

    return Case(f"bag-{name}", fz.FactorizedEmbeddingBag, dense, format, bags, full, thorough=thorough)


BAGS = (
    bag("mean", LOW, 3, thorough=True),
    bag("sum", 1, 3, thorough=True, mode="sum", padding_idx=2),
    bag("max", LOW, 3, thorough=True, mode="max"),
    bag("max-padding", 2, 3, mode="max", padding_idx=-2),
    bag("mean-padding", LOW, 3, padding_idx=7),
    bag("sparse", LOW, 3, mode="sum", sparse=True),
    bag("sparse-padding", 1, 3, mode="sum", sparse=True, padding_idx=2),
    bag("train", TRAIN, 2, thorough=True, mode="sum"),
    bag("tucker", TUCKER, 2, mode="max"),
    bag("kronecker", fz.Kronecker(), 2, padding_idx=7),
    bag("monarch", fz.Monarch(blocks=3), 1, thorough=True, mode="sum"),
)

DENSE: dict[int, type[Any]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FACTORIZED: dict[int, type[Any]] = {1: fz.FactorizedConv1d, 2: fz.FactorizedConv2d, 3: fz.FactorizedConv3d}
LAST = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
# Channels in and out, kernel size, spatial extents, and what else torch's layer is given.
GEOMETRIES: dict[str, tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((4, 6), (3,), (9,), {"padding": 1}),
    "1d-strided": ((4, 6), (3,), (17,), {"stride": 3, "dilation": 2, "padding": 2}),
    "1d-reflect": ((4, 6), (4,), (9,), {"padding": "same", "padding_mode": "reflect"}),
    "1d-groups": ((4, 6), (3,), (9,), {"groups": 2, "bias": False}),
    "2d": ((4, 6), (3, 3), (6, 7), {"padding": 1}),
    "2d-last": ((4, 6), (3, 3), (6, 7), {"padding": 1}),
    "2d-unequal": ((4, 6), (3, 2), (9, 8), {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2)}),
    "2d-same": ((4, 6), (2, 4), (6, 7), {"padding": "same"}),
    "2d-circular-last": (
        (4, 6),
        (3, 4),
        (6, 7),
        {"padding": "same", "padding_mode": "circular", "dilation": (2, 1)},
    ),
    "2d-valid": ((4, 6), (3, 2), (6, 7), {"padding": "valid", "stride": 2, "bias": False}),
    "2d-reflect": ((4, 6), (3, 5), (6, 7), {"padding": (1, 2), "padding_mode": "reflect"}),
    "2d-groups": ((8, 4), (3, 2), (6, 7), {"groups": 2, "padding": 1}),
    "2d-replicate": ((8, 4), (3, 2), (6, 7), {"groups": 2, "padding": 1, "padding_mode": "replicate"}),
    "2d-depthwise": ((4, 8), (3, 3), (6, 7), {"groups": 4, "padding": 1, "stride": (1, 2)}),
    "2d-pointwise": ((4, 6), (1, 1), (6, 7), {"stride": (2, 1)}),
    "3d": ((4, 6), (2, 3, 2), (4, 5, 6), {"stride": (1, 2, 1), "padding": (1, 0, 1)}),
    "3d-last-groups": ((4, 6), (3, 1, 2), (4, 5, 6), {"groups": 2, "padding": 1, "padding_mode": "circular"}),
    "3d-replicate": ((4, 6), (2, 2, 3), (4, 5, 6), {"padding": "same", "padding_mode": "replicate"}),
}
KINDS: dict[str, How] = {
    "spatial": LOW,
    "spatial-two-inner": 2,
    "channel": CHANNEL,
    "train": TRAIN,
    "tucker": TUCKER,
    "separable-train": fz.TensorTrain(separable=True),
    "separable-tucker": fz.Tucker(separable=True),
    "monarch": fz.Monarch(blocks=2),
    "kronecker": fz.Kronecker(),
    "residual": fz.Residual(),
}
# Put through everything: a few of every kind, in one, two and three dimensions.
THOROUGH = {
    "1d-strided-channel",
    "1d-tucker",
    "2d-spatial",
    "2d-last-spatial",
    "2d-groups-spatial-two-inner",
    "2d-unequal-channel",
    "2d-train",
    "2d-tucker",
    "2d-groups-train",
    "2d-unequal-separable-tucker",
    "2d-separable-train",
    "2d-monarch",
    "2d-groups-monarch",
    "2d-kronecker",
    "2d-residual",
    "2d-groups-residual",
    "3d-spatial",
    "3d-train",
    "3d-monarch",
}


def conv(geometry: str, kind: str, how: How | None = None, rank: Rank | None = None) -> Case:
    (inputs, outputs), kernel_size, extents, settings = GEOMETRIES[geometry]
    dims, groups = len(kernel_size), settings.get("groups", 1)
    weight = (outputs, inputs // groups, *kernel_size)
    how = KINDS[kind] if how is None else how
    if isinstance(how, fz.Monarch):
        how = fz.Monarch(blocks=gcd(2, *weight[:2]))
    format, full = formats(how, weight, rank or 2, groups)
    name = f"{geometry}-{kind}"

    def images(leading: tuple[int, ...]) -> Tensor:
        x = torch.randn(*leading, inputs, *extents)
        return x.contiguous(memory_format=LAST[dims]) if "last" in geometry and leading else x

    dense = partial(DENSE[dims], inputs, outputs, kernel_size, **settings)
    return Case(name, FACTORIZED[dims], dense, format, images, full, thorough=name in THOROUGH)


def separates(geometry: str) -> bool:
    return "groups" not in GEOMETRIES[geometry][3] and prod(GEOMETRIES[geometry][1]) > 1


CONVOLUTIONS = (
    *(conv(g, kind) for g in GEOMETRIES for kind in KINDS if separates(g) or not kind.startswith("separable")),
    conv("2d", "overcomplete", fz.Overcomplete("deep"), 30),
    conv("2d", "tucker-train-core", fz.Tucker(core="train"), (3, 2)),
    conv("2d", "tucker-that-mixes-sides", fz.Tucker(dims=(6, 6, 6)), (3, 2, 2)),
    conv("2d", "train-of-three", fz.TensorTrain(dims=(6, 4, 9)), (3, 4)),
    conv("2d", "separable-tucker-whole", fz.Tucker(separable=True, core="whole", dims=(6, 4))),
)


# Of transposed convolutions: the same, and what the stride leaves open.
TRANSPOSED: dict[str, tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((6, 4), (3,), (5,), {"padding": 1}),
    "1d-strided": ((6, 4), (4,), (5,), {"stride": 3, "padding": 1, "output_padding": 2, "dilation": 2}),
    "2d": ((6, 4), (3, 3), (4, 5), {"stride": 2, "padding": 1, "output_padding": 1}),
    "2d-last": ((6, 4), (4, 4), (4, 5), {"stride": 2, "padding": 1}),
    "2d-unequal": (
        (6, 4),
        (3, 2),
        (4, 3),
        {"stride": (3, 1), "padding": (0, 2), "output_padding": (2, 0), "dilation": (1, 3), "bias": False},
    ),
    "2d-groups": ((4, 8), (3, 2), (4, 5), {"groups": 2, "stride": (1, 2)}),
    "2d-pointwise": ((6, 4), (1, 1), (4, 5), {"stride": 2, "output_padding": 1}),
    "3d": ((6, 4), (2, 3, 2), (3, 2, 3), {"stride": (1, 2, 2), "padding": (1, 0, 1), "output_padding": (0, 1, 1)}),
    "3d-groups": ((4, 8), (2, 1, 2), (3, 2, 3), {"groups": 2}),
}
PLAIN_TRANSPOSED: dict[int, type[Any]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
FACTORIZED_TRANSPOSED: dict[int, type[Any]] = {
    1: fz.FactorizedConvTranspose1d,
    2: fz.FactorizedConvTranspose2d,
    3: fz.FactorizedConvTranspose3d,
}
THOROUGH_TRANSPOSED = {
    *("1d-strided-channel", "1d-train", "2d-spatial", "2d-last-spatial", "2d-groups-spatial-two-inner"),
    *("2d-unequal-tucker", "2d-unequal-separable-tucker", "2d-monarch", "2d-kronecker", "3d-spatial"),
}


def conv_transpose(geometry: str, kind: str) -> Case:
    (inputs, outputs), kernel_size, extents, settings = TRANSPOSED[geometry]
    dims, groups, how = len(kernel_size), settings.get("groups", 1), KINDS[kind]
    format, full = formats(how, (inputs, outputs // groups, *kernel_size), 2, groups)

    def images(leading: tuple[int, ...]) -> Tensor:
        x = torch.randn(*leading, inputs, *extents)
        return x.contiguous(memory_format=LAST[dims]) if "last" in geometry and leading else x

    dense = partial(PLAIN_TRANSPOSED[dims], inputs, outputs, kernel_size, **settings)
    name, thorough = f"{geometry}-{kind}-transposed", f"{geometry}-{kind}" in THOROUGH_TRANSPOSED
    return Case(name, FACTORIZED_TRANSPOSED[dims], dense, format, images, full, thorough=thorough)


CONVOLUTIONS_TRANSPOSED = tuple(
    conv_transpose(geometry, kind)
    for geometry in TRANSPOSED
    for kind in KINDS
    if ("groups" not in geometry and "pointwise" not in geometry) or not kind.startswith("separable")
)


class TestLinear(LayerContract):
    cases = LINEARS


class TestEmbedding(LayerContract):
    cases = EMBEDDINGS


class TestEmbeddingBag(LayerContract):
    cases = BAGS


class TestConv(LayerContract):
    cases = CONVOLUTIONS


class TestConvTranspose(LayerContract):
    cases = CONVOLUTIONS_TRANSPOSED


def test_every_case_has_a_name_of_its_own_and_those_to_be_looked_at_thoroughly_exist() -> None:
    cases = (*LINEARS, *EMBEDDINGS, *BAGS, *CONVOLUTIONS, *CONVOLUTIONS_TRANSPOSED)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.name for case in CONVOLUTIONS if case.thorough} == THOROUGH
    assert sum(case.thorough for case in CONVOLUTIONS_TRANSPOSED) == len(THOROUGH_TRANSPOSED)


def test_every_format_is_in_the_table() -> None:
    from factorized.planning.schemes import FORMATS

    assert {case.format.name for case in (*LINEARS, *EMBEDDINGS, *CONVOLUTIONS) if case.thorough} == set(FORMATS)


def test_without_pytest_the_contract_says_what_to_install() -> None:
    code = "import sys; sys.modules['pytest'] = None; import factorized.testing"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'ImportError: factorized.testing needs pytest; install it with pip install "factorized[dev]"' in (
        result.stderr
    )
