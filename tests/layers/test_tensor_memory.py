"""What tensorized layers allocate, measured: never more than twice what the dense layer does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from factorized import TensorizedConv2d, TensorizedLinear
from factorized.layers.execution import MOST_HELD
from factorized.maths.contraction import contracted_macs, held_channels
from factorized.maths.folding import fold
from factorized.maths.kernel import KernelShape


class Memory(TorchDispatchMode):
    """Follows the memory of all tensors that are made, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}
        self.now = self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._hold(tensor, is_new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._hold(tensor, is_new=True)
        return result

    def _hold(self, tensor: Any, is_new: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.untyped_storage()._cdata in self.bytes:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes() if is_new else 0
        self.bytes[storage._cdata] = size
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.now -= self.bytes.pop(key, 0)


def training_memory(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return the most bytes held at once in a training step, parameters and input included, and the largest tensor."""
    x = x.clone().requires_grad_()
    with Memory() as memory:
        layer(x).square().sum().backward()
    held = sum(tensor.numel() * tensor.element_size() for tensor in (x, *layer.parameters()))
    return memory.peak + held, memory.largest


def test_the_measuring_sees_what_is_made_and_freed() -> None:
    x, layer = torch.randn(50, 100), nn.Linear(100, 200, bias=False)
    with Memory() as memory:
        y = layer(x)
        assert memory.now == y.numel() * 4
        del y
        assert memory.now == 0
        assert memory.peak == memory.largest == 50 * 200 * 4


METHODS = ("tensor_train", "tucker")
# Inputs and outputs that are alike, and that are not: there a Kronecker product of factors would be larger than all.
LINEARS = [(1024, 1024), (256, 1024), (1024, 64), (10, 4096), (4096, 16)]
CONVOLUTIONS = [(64, 64, 3), (32, 128, 3), (128, 16, 5), (96, 64, 1)]
SHARES = (0.05, 0.3, 0.5, 0.7, 0.85)  # of full rank


def layers_that_save(dense: nn.Linear | nn.Conv2d, method: str, **options: Any) -> Iterator[nn.Module]:
    """Yield layers at several ranks, as long as they hold fewer parameters than the dense one."""
    shape = KernelShape.of(tuple(dense.weight.shape))
    folding = fold(shape, method, options.get("dims"), separable=options.get("separable", False))
    made: type[Any] = TensorizedLinear if isinstance(dense, nn.Linear) else TensorizedConv2d
    for share in SHARES:
        rank = folding.clipped(tuple(max(1, round(share * full)) for full in folding.full_ranks))
        if folding.format(rank).core_numel < 0.9 * folding.shape.numel:
            yield made.from_dense(dense, rank, nn.init.normal_, method=method, **options)


def check(dense: nn.Linear | nn.Conv2d, x: Tensor, method: str, **options: Any) -> None:
    allowed, largest = training_memory(dense, x)
    layers = list(layers_that_save(dense, method, **options))
    assert len(layers) >= 2
    for layer in layers:
        peak, tensor = training_memory(layer, x)
        assert peak <= 2 * allowed, (layer, peak / allowed)
        assert tensor <= 2 * largest, layer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("inputs", "outputs"), LINEARS)
@pytest.mark.parametrize("batch", [8, 256])
def test_a_linear_layer_holds_at_most_twice_what_the_dense_one_does(
    method: str, inputs: int, outputs: int, batch: int
) -> None:
    check(nn.Linear(inputs, outputs), torch.randn(batch, inputs), method)


@pytest.mark.parametrize("method", METHODS)
def test_a_linear_layer_does_so_for_dimensions_that_cannot_be_contracted(method: str) -> None:
    check(nn.Linear(512, 512), torch.randn(256, 512), method, dims=(64, 64, 64))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("inputs", "outputs", "size"), CONVOLUTIONS)
def test_a_convolution_holds_at_most_twice_what_the_dense_one_does(
    method: str, inputs: int, outputs: int, size: int
) -> None:
    check(nn.Conv2d(inputs, outputs, size, padding=size // 2), torch.randn(4, inputs, 8, 8), method)


@pytest.mark.parametrize("method", METHODS)
def test_a_separable_convolution_does_so(method: str) -> None:
    check(nn.Conv2d(64, 96, 3, padding=1), torch.randn(4, 64, 8, 8), method, separable=True)


@pytest.mark.parametrize(
    ("dense", "batch", "rank", "options"),
    [
        (nn.Linear(100, 96), 4, (8, 11, 10, 9), {"method": "tucker"}),
        (nn.Linear(128, 128), 1, (15, 29, 29), {"method": "tucker", "dims": (16, 32, 32)}),
        (nn.Conv2d(128, 96, 3, padding=1), 1, (17, 23, 31, 8), {"method": "tucker", "dims": (18, 24, 32, 8)}),
        (nn.Conv2d(16, 96, 5, stride=2), 1, (15, 11, 12, 7), {"method": "tucker", "dims": (15, 16, 16, 10)}),
        (nn.Linear(24, 128), 1, (2, 4, 1, 3, 24), {"method": "tucker", "dims": (2, 4, 1, 4, 96)}),
        (nn.Linear(100, 30), 1, (5, 6, 9, 10), {"method": "tucker"}),
        (
            nn.Linear(96, 128, bias=False),
            2,
            (2, 14, 2, 1, 43),
            {"method": "tucker", "dims": (2, 16, 2, 4, 48), "core": "train"},
        ),
        (nn.Linear(30, 12), 1, (1, 3, 1, 6, 1, 2), {"method": "tucker", "dims": (1, 3, 1, 40, 1, 3), "core": "train"}),
        (
            nn.Conv2d(96, 100, 3, stride=2, padding=1),
            1,
            (8, 3, 72, 3),
            {"method": "tucker", "dims": (10, 3, 960, 3), "core": "train"},
        ),
        (nn.Linear(128, 20), 2, (2, 4, 8, 16, 1), {"dims": (4, 2, 2, 2, 80, 1)}),
        (nn.Linear(96, 12, bias=False), 1, (2, 8, 17, 7), {"dims": (2, 4, 4, 4, 9)}),
    ],
)
def test_a_tensor_near_full_rank_does_so_for_the_smallest_of_batches(
    dense: Any, batch: int, rank: tuple[int, ...], options: dict[str, Any]
) -> None:
    linear = isinstance(dense, nn.Linear)
    made: type[Any] = TensorizedLinear if linear else TensorizedConv2d
    layer = made.from_dense(dense, rank, nn.init.normal_, **options)
    x = torch.randn(batch, dense.in_features) if linear else torch.randn(batch, dense.in_channels, 8, 12)
    assert layer.format.core_numel < layer.shape.numel
    assert not layer.format.keeps_little
    assert training_memory(layer, x)[0] <= 2 * training_memory(dense, x)[0]


@pytest.mark.parametrize("method", METHODS)
def test_thin_layers_are_contracted_with_their_input_and_thick_ones_composed(method: str) -> None:
    thin = TensorizedLinear(1024, 1024, 4, method=method, init=None)
    assert thin.chosen_execution() == thin.executions[0]
    conv = (
        TensorizedConv2d(512, 512, 3, 16, method=method, dims=(512, 512, 3, 3), init=None)
        if method == "tucker"
        else (TensorizedConv2d(512, 512, 3, (16, 16, 16, 9), method=method, init=None))
    )
    assert conv.chosen_execution() == conv.executions[0]
    matrix = TensorizedLinear(48, 48, (20, 20), method="tucker", dims=(48, 48))
    assert matrix.chosen_execution() == "one_product"
    small = TensorizedConv2d(8, 8, 3, 2, method=method, init=None)
    assert small.chosen_execution() == "one_conv"


def test_memory_chooses_where_time_would_choose_otherwise() -> None:
    # Composing is cheaper here, but the tensors on the way to the weight are nearly as large as it is.
    thick = TensorizedLinear(1024, 64, (7, 7, 27, 27), method="tucker", init=None)
    assert contracted_macs(thick.folding, thick.format) > thick.shape.numel
    assert thick.chosen_execution() == "three_products"
    # And here contracting is, were it not for the ten tensors on the way through the input's dimensions.
    long = TensorizedLinear(1024, 1024, (4, *[2] * 10), method="tucker", dims=(1024, *[2] * 10), init=None)
    assert 30 * contracted_macs(long.folding, long.format) < long.shape.numel
    assert held_channels(long.folding, long.format) > MOST_HELD * 2048
    assert long.chosen_execution() == "one_product"


def test_the_linear_that_made_others_allocate_gigabytes_stays_small() -> None:
    x = torch.randn(256, 1024)
    for method in METHODS:
        layer = TensorizedLinear(1024, 1024, 16, method=method, init=nn.init.normal_)
        peak, _ = training_memory(layer, x)
        assert peak < 16 * 2**20
