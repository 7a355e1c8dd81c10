"""The kernels that normalize inside convolutions, by Triton's interpreter: equal to the blocks of a WideResNet."""

from __future__ import annotations

import pytest

from tests.interpreted import needs_interpreter, run_interpreted

START = """
import copy
from dataclasses import replace
import torch
from torch import nn
import factorized as fz
from benchmarks import fused_block
from factorized.experiments.models.wide_resnet import wide_resnet

torch.manual_seed(0)
fused_block.TILES = replace(
    fused_block.TILES, positions=16, channels=16, programs=4, sum_channels=16, sum_size=256, sum_programs=4
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
cases = [(2, 1, 0.3, 8, 3, False), (3, 1, 0.6, 9, 2, True), (2, 2, 0.2, 12, 1, True)]
for blocks, width, ratio, size, batch, by_products in cases:
    fused_block.TILES = replace(fused_block.TILES, sums_by_products=by_products)
    plain, fused = networks(blocks, width, ratio)
    assert sum(isinstance(stage, fused_block.FusedBlocks) for stage in fused.stages) == 3
    x = torch.randn(batch, 3, size, size)
    exact = gradients(copy.deepcopy(plain).double(), x.double())
    for found, other, expected in zip(gradients(fused, x), gradients(plain, x), exact, strict=True):
        least = max(1e-6, 10 * (other - expected).norm() / expected.norm())
        assert (found - expected).norm() < least * expected.norm(), (blocks, width, found.shape)
    for found, expected in zip(fused.buffers(), plain.buffers(), strict=True):
        if found.is_floating_point():
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
