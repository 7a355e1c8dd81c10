"""Convolutions that normalize their input, on a GPU: equal to the layers one after another, and so is training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from factorized.experiments.models import wide_resnet as wide_resnet_module
from factorized.experiments.models.normalized import launches, layers
from factorized.experiments.models.resnet import resnet32x2
from factorized.experiments.models.vgg import vgg19_nfc
from factorized.experiments.models.wide_resnet import wide_resnet
from factorized.formats.launches import Launch, builder
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda


def tensors() -> nn.Module:
    return fz.factorize(wide_resnet(16, 2), fz.TensorTrain(separable=True), ratio=0.1)


# a network, its ratio, batch, height and width, how many convolutions normalize their input, how many other norms are
# one operator with their ReLU, and how many of these compiled code computes twice
CASES = {
    "WideResNet-16-10": (lambda: wide_resnet(16, 10), 0.0667, 4, 32, 9, 4, 0),
    "WideResNet-16-2": (lambda: wide_resnet(16, 2), 0.2, 16, 32, 9, 4, 0),
    "WideResNet-16-1": (lambda: wide_resnet(16, 1), 0.3, 5, 20, 9, 4, 0),
    "ResNet-32x2": (resnet32x2, 0.1, 8, 32, 15, 16, 0),
    "ResNet-32x2, dense": (resnet32x2, None, 8, 32, 0, 31, 0),
    "VGG-19, dense": (vgg19_nfc, None, 8, 32, 0, 16, 0),
    "WideResNet-16-2, Tensor-Train": (tensors, None, 16, 32, 0, 13, 12),
}
Case = tuple[Callable[[], nn.Module], float | None, int, int, int, int, int]


@pytest.fixture(autouse=True)
def _narrow_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST_CHANNELS", 16)


def networks(make: Callable[[], nn.Module], ratio: float | None) -> tuple[nn.Module, nn.Module]:
    """Return a network whose convolutions run by products, as most do by themselves where compiled, and a copy."""
    torch.manual_seed(0)
    dense = make()
    for norm in dense.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
    network = dense if ratio is None else fz.factorize(dense, fz.LowRank(), ratio=ratio)
    network = network.cuda().to(memory_format=torch.channels_last).train()
    for layer in network.modules():
        if isinstance(layer, fz.FactorizedConv2d) and "products" in layer.executions:
            layer.execution = "products"
    return network, copy.deepcopy(network)


@contextmanager
def no_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for place in (layers, wide_resnet_module):
            patch.setattr(place, "kernels_apply", lambda x, layers: False)
        patch.setattr(layers, "_has_gpu_kernels", lambda x: False)
        yield


def images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)


def outputs_and_gradients(network: Any, parameters: list[nn.Parameter], x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = network(x).double()
    return [y.detach(), *torch.autograd.grad((y - y.mean()).square().sum(), (x, *parameters))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients_are_those_of_float64(
    case: Case, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    make, ratio, batch, size, normalizing, others, twice = case
    fused, plain = networks(make, ratio)
    x = images(batch, size)
    run = torch.compile(fused, fullgraph=True, dynamic=False) if compiled else fused
    outputs_and_gradients(run, list(fused.parameters()), x, torch.bfloat16)  # compiles, and asks for launches
    fused.load_state_dict(plain.state_dict())
    builder.wait()
    used = {"backward_launches": 0, "activation_gradient_launches": 0, "activation_launches": 0}

    def counted(name: str, own: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
        def count(*given: Any) -> list[Launch]:
            used[name] += 1
            return own(*given)

        return count

    for name in used:
        monkeypatch.setattr(launches, name, counted(name, getattr(launches, name)))
    found = outputs_and_gradients(run, list(fused.parameters()), x, torch.bfloat16)
    assert list(used.values()) == [normalizing, others, others + compiled * twice]
    with no_kernels():
        usual = outputs_and_gradients(plain, list(plain.parameters()), x, torch.bfloat16)
        exact = copy.deepcopy(plain).double()
        wanted = outputs_and_gradients(exact, list(exact.parameters()), x.double(), torch.float64)
    ratios = []  # of our errors to those without the kernels, which flips of ReLUs make vary
    for ours, theirs, expected in zip(found, usual, wanted, strict=True):
        error, usual_error = ((tensor.double() - expected).norm().item() for tensor in (ours, theirs))
        ratios.append(error / (usual_error + 1e-3 * expected.norm().item()))
    assert median(ratios) < 1.3
    assert max(ratios) < 4
    for ours, theirs in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def test_results_do_not_vary_from_run_to_run() -> None:
    fused, _ = networks(lambda: wide_resnet(16, 2), 0.2)
    x = images(16, 32)
    first = outputs_and_gradients(fused, list(fused.parameters()), x, torch.bfloat16)
    for _ in range(3):
        again = outputs_and_gradients(fused, list(fused.parameters()), x, torch.bfloat16)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_losses_of_training_are_those_without_the_kernels() -> None:
    def losses(network: nn.Module) -> Tensor:
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
        return torch.tensor(told)

    fused, plain = networks(lambda: wide_resnet(16, 2), 0.2)
    ours = losses(fused)
    with no_kernels():
        usual = losses(plain)
    assert usual[-1] < 0.5 * usual[0]
    assert (ours - usual).abs().mean() < 0.05 * usual[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_is_not_a_number_stays_so(case: Case) -> None:
    make, ratio, batch, size, *_ = case
    network, _ = networks(make, ratio)
    next(network.parameters()).data.fill_(math.nan)
    with torch.autocast("cuda", torch.bfloat16):
        assert network(images(batch, size)).isnan().all()
