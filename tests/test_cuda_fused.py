"""Convolutions that normalize their input, on a GPU: equal to the blocks of a WideResNet, and so is training."""

from __future__ import annotations

import copy
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from benchmarks import fused_block
from benchmarks.fused_block import fuse
from factorized.experiments.models.wide_resnet import WideResNet, wide_resnet
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda
# width, ratio, batch, height and width
CASES = [(10, 0.0667, 4, 32), (2, 0.2, 16, 32), (1, 0.3, 5, 20)]


def networks(width: int, ratio: float) -> tuple[WideResNet, WideResNet]:
    torch.manual_seed(0)
    dense = wide_resnet(16, width)
    for norm in dense.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
    plain = fz.factorize(dense, fz.LowRank(), ratio=ratio).cuda().to(memory_format=torch.channels_last).train()
    return plain, fuse(copy.deepcopy(plain))


def images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)


def outputs_and_gradients(network: Any, parameters: list[nn.Parameter], x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = network(x).double()
    return [y, *torch.autograd.grad((y - y.mean()).square().sum(), (x, *parameters))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_float64(
    case: tuple[int, float, int, int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    width, ratio, batch, size = case
    plain, fused = networks(width, ratio)
    x = images(batch, size)
    used = []
    own = fused_block.backward_launches
    monkeypatch.setattr(fused_block, "backward_launches", lambda *given: used.append(1) or own(*given))
    run = torch.compile(fused, fullgraph=True, dynamic=False) if compiled else fused
    found = outputs_and_gradients(run, list(fused.parameters()), x, torch.bfloat16)
    assert len(used) == 9  # convolutions but the first of each of three stages
    usual = outputs_and_gradients(plain, list(plain.parameters()), x, torch.bfloat16)
    exact = copy.deepcopy(plain).double()
    wanted = outputs_and_gradients(exact, list(exact.parameters()), x.double(), torch.float64)
    ratios = []  # of our errors to those without the kernels, which flips of ReLUs make vary
    for ours, theirs, expected in zip(found, usual, wanted, strict=True):
        error, usual_error = (float((tensor.double() - expected).norm()) for tensor in (ours, theirs))
        ratios.append(error / (usual_error + 1e-3 * float(expected.norm())))
    assert median(ratios) < 1.3
    assert max(ratios) < 4
    for ours, theirs in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def test_results_do_not_vary_from_run_to_run() -> None:
    _, fused = networks(2, 0.2)
    x = images(16, 32)
    first = outputs_and_gradients(fused, list(fused.parameters()), x, torch.bfloat16)
    for _ in range(3):
        again = outputs_and_gradients(fused, list(fused.parameters()), x, torch.bfloat16)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_losses_of_training_are_those_without_the_kernels() -> None:
    losses = []
    for network in networks(2, 0.2):
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        torch.manual_seed(1)
        x, y = images(64, 32), torch.randint(10, (64,), device="cuda")
        told = []
        for _ in range(30):
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
        losses.append(torch.tensor(told))
    usual, ours = losses
    assert usual[-1] < 0.5 * usual[0]
    assert (ours - usual).abs().mean() < 0.05 * usual[0]
