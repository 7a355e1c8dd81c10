"""What tensorized layers allocate, measured: never more than twice what the dense layer does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorized import FactorizedConv2d, FactorizedLinear, TensorTrain, Tucker
from factorized.experiments.bench.memory import TensorMemory
from factorized.formats.folding import TensorScheme
from factorized.formats.format import Call, Format
from factorized.formats.kernel import KernelShape
from factorized.formats.tensor_format import MOST_HELD, TensorFormat
from factorized.nn.layer import FactorizedLayer


def training_memory(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return the most bytes held at once in a training step, parameters and input included, and the largest tensor."""
    x = x.clone().requires_grad_()
    with TensorMemory() as memory:
        layer(x).square().sum().backward()
    held = sum(tensor.numel() * tensor.element_size() for tensor in (x, *layer.parameters()))
    return memory.peak + held, memory.largest


def test_the_measuring_sees_what_is_made_and_freed() -> None:
    x, layer = torch.randn(50, 100), nn.Linear(100, 200, bias=False)
    with TensorMemory() as memory:
        y = layer(x)
        assert memory.now == y.numel() * 4
        del y
        assert memory.now == 0
        assert memory.peak == memory.largest == 50 * 200 * 4


METHODS: tuple[type[TensorScheme], ...] = (TensorTrain, Tucker)
# Inputs and outputs that are alike, and that are not: there a Kronecker product of factors would be larger than all.
LINEARS = [(1024, 1024), (256, 1024), (1024, 64), (10, 4096), (4096, 16)]
CONVOLUTIONS = [(64, 64, 3), (32, 128, 3), (128, 16, 5), (96, 64, 1)]
SHARES = (0.05, 0.3, 0.5, 0.7, 0.85)  # of full rank


def layers_that_save(dense: nn.Linear | nn.Conv2d, scheme: TensorScheme) -> Iterator[nn.Module]:
    """Yield layers at several ranks, as long as they hold fewer parameters than the dense one."""
    shape = KernelShape.of(tuple(dense.weight.shape))
    folded = scheme.at_rank(shape, 1).decayed[0]
    assert isinstance(folded, TensorFormat)
    for share in SHARES:
        format = scheme.at_rank(shape, tuple(max(1, round(share * full)) for full in folded.full_ranks))
        if format.decayed[0].numel < 0.9 * folded.shape.numel:
            yield layer_of(dense, format)


def layer_of(dense: nn.Linear | nn.Conv2d, format: Format) -> FactorizedLayer:
    made: type[Any] = FactorizedLinear if isinstance(dense, nn.Linear) else FactorizedConv2d
    layer: FactorizedLayer = made.from_dense(dense, format, nn.init.normal_)
    return layer


def check(dense: nn.Linear | nn.Conv2d, x: Tensor, scheme: TensorScheme) -> None:
    allowed, largest = training_memory(dense, x)
    layers = list(layers_that_save(dense, scheme))
    assert len(layers) >= 2
    for layer in layers:
        peak, tensor = training_memory(layer, x)
        assert peak <= 2 * allowed, (layer, peak / allowed)
        assert tensor <= 2 * largest, layer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("inputs", "outputs"), LINEARS)
@pytest.mark.parametrize("batch", [8, 256])
def test_a_linear_layer_holds_at_most_twice_what_the_dense_one_does(
    method: type[TensorScheme], inputs: int, outputs: int, batch: int
) -> None:
    check(nn.Linear(inputs, outputs), torch.randn(batch, inputs), method())


@pytest.mark.parametrize("method", METHODS)
def test_a_linear_layer_does_so_for_dimensions_that_cannot_be_contracted(method: type[TensorScheme]) -> None:
    check(nn.Linear(512, 512), torch.randn(256, 512), method(dims=(64, 64, 64)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("inputs", "outputs", "size"), CONVOLUTIONS)
def test_a_convolution_holds_at_most_twice_what_the_dense_one_does(
    method: type[TensorScheme], inputs: int, outputs: int, size: int
) -> None:
    check(nn.Conv2d(inputs, outputs, size, padding=size // 2), torch.randn(4, inputs, 8, 8), method())


@pytest.mark.parametrize("method", METHODS)
def test_a_separable_convolution_does_so(method: type[TensorScheme]) -> None:
    check(nn.Conv2d(64, 96, 3, padding=1), torch.randn(4, 64, 8, 8), method(separable=True))


@pytest.mark.parametrize(
    ("dense", "batch", "rank", "scheme"),
    [
        (nn.Linear(100, 96), 4, (8, 11, 10, 9), Tucker()),
        (nn.Linear(128, 128), 1, (15, 29, 29), Tucker(dims=(16, 32, 32))),
        (nn.Conv2d(128, 96, 3, padding=1), 1, (17, 23, 31, 8), Tucker(dims=(18, 24, 32, 8))),
        (nn.Conv2d(16, 96, 5, stride=2), 1, (15, 11, 12, 7), Tucker(dims=(15, 16, 16, 10))),
        (nn.Linear(24, 128), 1, (24, 2, 4, 1, 3), Tucker(dims=(96, 2, 4, 1, 4))),
        (nn.Linear(100, 30), 1, (5, 6, 9, 10), Tucker()),
        (
            nn.Linear(96, 128, bias=False),
            2,
            (2, 14, 2, 1, 43),
            Tucker(dims=(2, 16, 2, 4, 48), core="train"),
        ),
        (nn.Linear(30, 12), 1, (1, 3, 1, 6, 1, 2), Tucker(dims=(1, 3, 1, 40, 1, 3), core="train")),
        (
            nn.Conv2d(96, 100, 3, stride=2, padding=1),
            1,
            (8, 3, 72, 3),
            Tucker(dims=(10, 3, 960, 3), core="train"),
        ),
        (nn.Linear(128, 20), 2, (2, 4, 8, 16, 1), TensorTrain(dims=(4, 2, 2, 2, 80, 1))),
        (nn.Linear(96, 12, bias=False), 1, (2, 8, 17, 7), TensorTrain(dims=(2, 4, 4, 4, 9))),
    ],
)
def test_a_tensor_near_full_rank_does_so_for_the_smallest_of_batches(
    dense: Any, batch: int, rank: tuple[int, ...], scheme: TensorScheme
) -> None:
    format = scheme.at_rank(KernelShape.of(tuple(dense.weight.shape)), rank)
    assert isinstance(format, TensorFormat)
    assert format.rank == rank
    layer, linear = layer_of(dense, format), isinstance(dense, nn.Linear)
    x = torch.randn(batch, dense.in_features) if linear else torch.randn(batch, dense.in_channels, 8, 12)
    assert format.numel < format.shape.numel
    assert not format.keeps_little
    assert training_memory(layer, x)[0] <= 2 * training_memory(dense, x)[0]


def chosen(scheme: TensorScheme, weight: tuple[int, ...], rank: Any) -> str:
    format = scheme.at_rank(KernelShape.of(weight), rank)
    if len(weight) == 2:
        return FactorizedLinear(weight[1], weight[0], format, init=None).chosen_execution()
    return FactorizedConv2d(weight[1], weight[0], weight[2:], format, init=None).chosen_execution()


@pytest.mark.parametrize("method", METHODS)
def test_thin_layers_run_as_chains_and_thick_ones_composed(method: type[TensorScheme]) -> None:
    assert chosen(method(), (1024, 1024), 4) == "chain"
    assert chosen(method(), (512, 512, 3, 3), 16 if method is Tucker else (16, 16, 16, 9)) == "chain"
    assert chosen(Tucker(dims=(48, 48)), (48, 48), (20, 20)) == "composed"
    assert chosen(method(), (8, 8, 3, 3), 2) == "composed"


def test_memory_chooses_where_time_would_choose_otherwise() -> None:
    # Composing is cheaper here, but the tensors on the way to the weight are nearly as large as it is.
    thick = Tucker().at_rank(KernelShape.of((64, 1024)), (7, 7, 27, 27))
    assert thick.chain_macs(Call(1)) > thick.shape.numel
    assert chosen(Tucker(), (64, 1024), (7, 7, 27, 27)) == "chain"
    # And here the chain is, were it not for the ten tensors on the way through the input's dimensions.
    dims, ranks = (1024, *[2] * 10), (4, *[2] * 10)
    long = Tucker(dims=dims).at_rank(KernelShape.of((1024, 1024)), ranks)
    assert isinstance(long, TensorFormat)
    assert 30 * long.chain_macs(Call(1)) < long.shape.numel
    assert long.held_channels > MOST_HELD * 2048
    assert chosen(Tucker(dims=dims), (1024, 1024), ranks) == "composed"


def test_the_linear_that_made_others_allocate_gigabytes_stays_small() -> None:
    x = torch.randn(256, 1024)
    for method in METHODS:
        format = method().at_rank(KernelShape.of((1024, 1024)), 16)
        peak, _ = training_memory(FactorizedLinear(1024, 1024, format, init=nn.init.normal_), x)
        assert peak < 16 * 2**20
