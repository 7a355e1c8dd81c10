"""The kernels that normalize inside convolutions: by Triton's interpreter equal to a WideResNet, else not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from benchmarks.fused_block import fuse, kernels_suit, layers_of
from factorized.experiments.models.wide_resnet import WideResNet, wide_resnet
from tests.interpreted import needs_interpreter, run_interpreted

START = """
import copy
from dataclasses import replace
import torch
from torch import nn
import factorized as fz
from benchmarks import fused_block, fused_launches
from factorized.experiments.models.wide_resnet import wide_resnet

torch.manual_seed(0)
fused_block.kernels_apply = lambda x, layers: layers[0][0].training
fused_launches.TILES = replace(
    fused_launches.TILES, positions=16, channels=16, programs=4, walk_channels=16, walk_size=256, walk_programs=4
)


def networks(blocks, width, ratio):
    dense = wide_resnet(6 * blocks + 4, width)
    for norm in dense.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias)
    plain = fz.factorize(dense, fz.LowRank(), ratio=ratio).train()
    return plain, fused_block.fuse(copy.deepcopy(plain))


def gradients(network, x):
    x = x.clone(memory_format=torch.channels_last).requires_grad_()
    y = network(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *network.parameters()))]
"""

EQUAL = (
    START
    + """
for blocks, width, ratio, size, batch in [(2, 1, 0.3, 8, 3), (3, 1, 0.6, 9, 2), (2, 2, 0.2, 12, 1)]:
    plain, fused = networks(blocks, width, ratio)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(batch, 3, size, size)
    exact = gradients(copy.deepcopy(plain).double(), x.double())
    for found, other, expected in zip(gradients(fused, x), gradients(plain, x), exact, strict=True):
        least = max(1e-6, 10 * (other - expected).norm() / expected.norm())
        assert (found - expected).norm() < least * expected.norm(), (blocks, width, found.shape)
    for found, expected in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-4)
"""
)

COMPILED = (
    START
    + """
plain, fused = networks(2, 1, 0.3)
x = torch.randn(2, 3, 8, 8)
eager = gradients(copy.deepcopy(fused), x)
compiled = torch.compile(fused, fullgraph=True, dynamic=False, backend="aot_eager")
for found, expected in zip(gradients(compiled, x), eager, strict=True):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
"""
)


LAUNCHES = """
from dataclasses import replace
import torch
from benchmarks import fused_times

stage = (32, 8, 7)
for name, tiles in fused_times.SETTINGS.items():
    launches = fused_times.launches_of(stage, 2, tiles, torch.device("cpu"))
    assert len(launches) == 8, launches.keys()
    for launch in launches.values():
        launch.run()
"""


@pytest.mark.nightly
@needs_interpreter
@pytest.mark.parametrize("program", [EQUAL, COMPILED, LAUNCHES], ids=["equal", "compiled", "timed"])
def test_interpreted_kernels_compute_what_blocks_of_a_wide_resnet_compute(program: str) -> None:
    run_interpreted(program)


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
    with torch.autocast("cpu", dtype, **more):
        return kernels_suit(torch.randn(2, 16, 8, 8), layers_of(network.stages[0]))  # type: ignore[arg-type]


def test_stages_of_low_rank_layers_suit_the_kernels_in_half_precision() -> None:
    assert suits(small())
    assert not suits(small(), enabled=False)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_stages_with_other_layers_do_not_suit_the_kernels(change: Callable[[WideResNet], object]) -> None:
    network = small()
    change(network)
    assert not suits(network)


def test_ranks_above_the_largest_do_not_suit_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fused_block.LARGEST_RANK", 4)
    assert not suits(small())


def test_where_the_kernels_do_not_apply_a_stage_is_the_usual_one() -> None:
    plain, fused = small(), fuse(small())
    x = torch.randn(2, 3, 8, 8)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(fused(x), plain(x))
    assert all(torch.equal(*pair) for pair in zip(fused.buffers(), plain.buffers(), strict=True))
