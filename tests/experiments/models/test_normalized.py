"""The kernels that normalize inside convolutions: by Triton's interpreter equal to the layers, else not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.experiments.models import wide_resnet as module
from factorized.experiments.models.normalized.layers import kernels_suit
from factorized.experiments.models.resnet import resnet32x2
from factorized.experiments.models.vgg import vgg19_nfc
from factorized.experiments.models.wide_resnet import WideResNet, wide_resnet
from tests.interpreted import needs_interpreter, run_interpreted

START = """
import copy
from dataclasses import replace
import torch
from torch import nn
import factorized as fz
from factorized.experiments.models import wide_resnet
from factorized.experiments.models.normalized import layers, tiles
from factorized.experiments.models.resnet import ResNet

torch.manual_seed(0)
tiles.TILES = replace(
    tiles.TILES, positions=16, channels=16, programs=4, walk_channels=16, walk_size=256, walk_programs=4,
    stream_size=512, cover_size=256,
)


def use_kernels(used):
    wide_resnet.kernels_apply = layers.kernels_apply = lambda x, layers: used and layers[0][0].training
    layers._has_gpu_kernels, layers.norm_suits = lambda x: used, lambda x, norm: norm.training


def low_rank(dense, ratio):
    for norm in dense.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias)
    return fz.factorize(dense, fz.LowRank(), ratio=ratio).train()


def gradients(network, x):
    x = x.clone(memory_format=torch.channels_last).requires_grad_()
    y = network(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *network.parameters()))]


def penalty(network, x):
    x = x.clone(memory_format=torch.channels_last).requires_grad_()
    (gradient,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), (x, *network.parameters()))
"""

EQUAL = (
    START
    + """
for dense, ratio, x in [
    (wide_resnet.wide_resnet(16, 1), 0.3, torch.randn(3, 3, 8, 8)),
    (wide_resnet.wide_resnet(22, 1), 0.6, torch.randn(2, 3, 9, 9)),
    (wide_resnet.wide_resnet(16, 2), 0.2, torch.randn(1, 3, 12, 12)),
    (ResNet(8, (16, 32, 32), "conv", 10), 0.4, torch.randn(2, 3, 12, 12)),
]:
    network = low_rank(dense, ratio)
    usual, exact = copy.deepcopy(network), copy.deepcopy(network).double()
    use_kernels(True)
    ours = gradients(network, x)
    use_kernels(False)
    assert not torch.equal(ours[-1], gradients(copy.deepcopy(usual), x)[-1]), "no kernel ran"
    for found, other, expected in zip(ours, gradients(usual, x), gradients(exact, x.double()), strict=True):
        least = max(1e-6, 10 * (other - expected).norm() / expected.norm())
        assert (found - expected).norm() < least * expected.norm(), found.shape
    for found, expected in zip(network.buffers(), usual.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(network.eval()(x), usual.eval()(x), rtol=1e-4, atol=1e-4)
"""
)

COMPILED = (
    START
    + """
network, x = low_rank(wide_resnet.wide_resnet(16, 1), 0.3), torch.randn(2, 3, 8, 8)
use_kernels(True)
eager = gradients(copy.deepcopy(network), x)
compiled = torch.compile(network, fullgraph=True, dynamic=False, backend="aot_eager")
for found, expected in zip(gradients(compiled, x), eager, strict=True):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
"""
)

TWICE = (
    START
    + """
for dense in (wide_resnet.wide_resnet(16, 1), ResNet(8, (16, 32, 32), "conv", 10)):
    network, x = low_rank(dense, 0.4), torch.randn(2, 3, 8, 8)
    use_kernels(True)
    ours = penalty(network, x)
    use_kernels(False)
    for found, expected in zip(ours, penalty(network, x), strict=True):
        assert (found - expected).norm() < 1e-3 * expected.norm() + 1e-4
"""
)

SIZES = """
import copy
from dataclasses import replace
import torch
import torch.nn.functional as F
from torch import nn
import factorized as fz
from factorized.experiments.models.normalized import tiles
from factorized.experiments.models.normalized import layers as normalized_layers
from factorized.experiments.models.normalized.convolutions import normalized_convolutions
from factorized.experiments.models.normalized.layers import activate, as_read
from factorized.experiments.models.normalized.statistics import measured

torch.manual_seed(0)
tiles.TILES = replace(tiles.TILES, programs=1)  # as large as with a batch of 128


def by_kernels(x, norm, conv):
    y = as_read(x)
    return normalized_convolutions(y, measured(y), y, [(norm, conv)])[0]


def usual(x, norm, conv):
    return x + F.conv2d(F.relu(norm(x.to(norm.weight.dtype))).to(x.dtype), conv.weight.to(x.dtype), padding=1)


def outcome(run, x, gradient, norm, conv, dtype):
    x = x.to(dtype).requires_grad_()
    y = run(x, norm, conv)
    found = torch.autograd.grad(y, (x, *norm.parameters(), *conv.parameters()), gradient.to(y.dtype))
    return [y.detach().double(), *(tensor.double() for tensor in found)]


layers = [(160, 32, 15, 1), (320, 16, 31, 2), (640, 8, 61, 4), (64, 32, 9, 1), (256, 8, 37, 3)]  # the last is the batch
for channels, size, rank, batch in layers:
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias, std=0.3)
    conv = fz.FactorizedConv2d(channels, channels, 3, rank, padding=1, bias=False)
    x = torch.randn(batch, channels, size, size).to(memory_format=torch.channels_last)
    gradient = torch.randn(batch, channels, size, size)
    ours = outcome(by_kernels, x, gradient, norm, conv, torch.float16)
    theirs = outcome(usual, x, gradient, norm, conv, torch.float16)
    exact = outcome(usual, x, gradient, copy.deepcopy(norm).double(), copy.deepcopy(conv).double(), torch.float64)
    for found, other, expected in zip(ours, theirs, exact, strict=True):
        allowed = 1.3 * (other - expected).norm() + 1e-4 * expected.norm()
        assert (found - expected).norm() < allowed, (channels, found.shape)


def activated(x, norm, added):
    return activate(norm, x, added)


def as_usual(x, norm, added):
    y = norm(x.to(norm.weight.dtype)).to(x.dtype)
    return F.relu(y if added is None else y + added)


normalized_layers._has_gpu_kernels = normalized_layers.norm_suits = lambda *given: True
for channels, size, batch in [(16, 32, 2), (64, 32, 1), (160, 32, 1), (512, 2, 8), (512, 4, 4), (48, 7, 3)]:
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias, std=0.3)
    theirs_norm, exact_norm = copy.deepcopy(norm), copy.deepcopy(norm).double()
    x = (torch.randn(batch, channels, size, size) + 5).to(memory_format=torch.channels_last)
    for added in (None, torch.randn_like(x)):
        gradient = torch.randn_like(x)

        def run(function, own, dtype):
            given = [x.to(dtype).requires_grad_()]
            given += [] if added is None else [added.to(dtype).requires_grad_()]
            y = function(given[0], own, None if added is None else given[1])
            found = torch.autograd.grad(y, (*given, *own.parameters()), gradient.to(y.dtype))
            return [y.detach().double(), *(tensor.double() for tensor in found)]

        ours, theirs = run(activated, norm, torch.float16), run(as_usual, theirs_norm, torch.float16)
        exact = run(as_usual, exact_norm, torch.float64)
        for found, other, expected in zip(ours, theirs, exact, strict=True):
            allowed = 1.3 * (other - expected).norm() + 1e-3 * expected.norm()
            assert (found - expected).norm() < allowed, (channels, found.shape)
        for found, expected in zip(norm.buffers(), exact_norm.buffers(), strict=True):
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-3, atol=1e-4)
"""

LAUNCHES = """
from dataclasses import replace
import torch
from benchmarks import normalized_times

stage = (32, 8, 7)
for name, tiles in normalized_times.SETTINGS.items():
    launches = normalized_times.launches_of(stage, 2, tiles, torch.device("cpu"))
    assert len(launches) == 15, launches.keys()
    for launch in launches.values():
        launch.run()
"""


@pytest.mark.nightly
@needs_interpreter
@pytest.mark.parametrize(
    "program", [EQUAL, COMPILED, TWICE, SIZES, LAUNCHES], ids=["equal", "compiled", "twice", "sizes", "timed"]
)
def test_interpreted_kernels_compute_what_the_layers_compute(program: str) -> None:
    run_interpreted(program)


@pytest.fixture(autouse=True)
def _narrow_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorized.experiments.models.normalized.layers.LEAST_CHANNELS", 16)


def small(depth: int = 16, rank_scale: float = 0.1, **more: Any) -> WideResNet:
    torch.manual_seed(0)
    return fz.factorize(wide_resnet(depth, 1), fz.LowRank(), rank_scale=rank_scale, **more).train()


def second_block(network: WideResNet) -> Any:
    return network.stages[0][1]  # type: ignore[index]


def changed_norm(**settings: Any) -> Callable[[WideResNet], object]:
    def change(network: WideResNet) -> None:
        second_block(network).bn2 = nn.BatchNorm2d(16, **settings)

    return change


CHANGES: dict[str, Callable[[WideResNet], object]] = {
    "a norm in evaluation mode": lambda network: second_block(network).bn1.eval(),
    "another kind of norm": lambda network: setattr(second_block(network), "bn2", nn.SyncBatchNorm(16)),
    "no running statistics": changed_norm(track_running_stats=False),
    "an average over all batches": changed_norm(momentum=None),
    "no scale and shift": changed_norm(affine=False),
    "another epsilon": changed_norm(eps=1e-3),
    "a hook on a norm": lambda network: second_block(network).bn1.register_forward_hook(print),
    "a hook on a convolution": lambda network: second_block(network).conv1.register_forward_pre_hook(print),
    "a hook on gradients": lambda network: second_block(network).conv2.register_full_backward_hook(print),
    "a dense layer": lambda network: setattr(second_block(network), "conv2", nn.Conv2d(16, 16, 3, padding=1)),
    "a composed layer": lambda network: setattr(second_block(network).conv1, "execution", "composed"),
    "another stride": lambda network: setattr(
        second_block(network), "conv1", fz.FactorizedConv2d(16, 16, 3, 4, stride=2, padding=1, bias=False)
    ),
    "a bias": lambda network: setattr(
        second_block(network), "conv2", fz.FactorizedConv2d(16, 16, 3, 4, padding=1, bias=True)
    ),
    "another kind of product": lambda network: setattr(
        second_block(network), "conv2", fz.FactorizedConv2d(16, 16, 3, 4, padding=1, bias=False, kind="channel")
    ),
    "a third factor": lambda network: setattr(
        second_block(network), "conv2", fz.FactorizedConv2d(16, 16, 3, 4, padding=1, bias=False, depth=1)
    ),
}


def suits(network: WideResNet, dtype: torch.dtype = torch.bfloat16, **more: Any) -> bool:
    for layer in network.modules():
        if isinstance(layer, fz.FactorizedConv2d) and layer.execution == "auto":
            layer.execution = "products"  # as chosen for code that is compiled for a GPU
    with torch.autocast("cpu", dtype, **more):
        return kernels_suit(torch.randn(2, 16, 8, 8), network.stages[0].layers)  # type: ignore[union-attr,arg-type]


def test_stages_of_low_rank_layers_suit_the_kernels_in_half_precision() -> None:
    assert suits(small())
    assert not suits(small(), enabled=False)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_stages_with_other_layers_do_not_suit_the_kernels(change: Callable[[WideResNet], object]) -> None:
    network = small()
    change(network)
    assert not suits(network)


def test_layers_that_run_another_way_by_themselves_do_not_suit_the_kernels() -> None:
    network = small()
    with torch.autocast("cpu", torch.bfloat16):
        layers = network.stages[0].layers  # type: ignore[union-attr]
        chosen = {conv.chosen_execution() for _, conv in layers}  # type: ignore[operator,union-attr]
        assert "products" not in chosen
        assert not kernels_suit(torch.randn(2, 16, 8, 8), layers)  # type: ignore[arg-type]


def test_layers_with_few_channels_do_not_suit_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorized.experiments.models.normalized.layers.LEAST_CHANNELS", 17)
    assert not suits(small())


def test_ranks_above_the_largest_do_not_suit_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorized.experiments.models.normalized.layers.LARGEST_RANK", 4)
    assert not suits(small())


BLOCKS: dict[str, Callable[[WideResNet], object]] = {
    "a hook on a block": lambda network: second_block(network).register_forward_hook(lambda *_: None),
    "a forward of its own": lambda network: setattr(second_block(network), "forward", second_block(network).forward),
    "another kind of block": lambda network: network.stages[0].__setitem__(1, nn.Identity()),  # type: ignore[operator]
}


@pytest.mark.parametrize("change", BLOCKS.values(), ids=BLOCKS.keys())
def test_stages_that_do_more_than_call_their_layers_run_as_usual(
    change: Callable[[WideResNet], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kernels_apply", lambda x, layers: True)
    network = small()
    assert all(stage.is_plain for stage in network.stages)  # type: ignore[union-attr]
    change(network)
    first: Any = network.stages[0]
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(first(x), nn.Sequential(*first)(x))


def test_where_the_kernels_do_not_apply_a_stage_is_the_usual_one() -> None:
    network, plain = small(), small()
    plain.stages = nn.Sequential(*(nn.Sequential(*stage) for stage in plain.stages))  # type: ignore[misc]
    x = torch.randn(2, 3, 8, 8)
    assert network.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(network(x), plain(x))
    assert all(torch.equal(*pair) for pair in zip(network.buffers(), plain.buffers(), strict=True))


@pytest.mark.parametrize("make", [wide_resnet, resnet32x2, vgg19_nfc])
def test_lowered_networks_are_traced_by_fx(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    network = fz.lower(fz.factorize(make(), fz.LowRank(), ratio=0.1, init="default")).eval()
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(torch.fx.symbolic_trace(network)(x), network(x))
