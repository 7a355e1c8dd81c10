"""Formats that are no products on a GPU: the same results as on the CPU, and steps captured as CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme
from tests.models.tensorized import SCHEMES, images, tensorized
from tests.on_gpu import needs_cuda
from tests.test_cuda import adamw, flambe, trained

FOLDED = [fz.TensorTrain(), fz.Tucker()]
pytestmark = needs_cuda


@pytest.mark.parametrize("kind", SCHEMES)
def test_models_compute_on_the_gpu_what_they_do_on_the_cpu(kind: str) -> None:
    model = tensorized(kind).eval()
    expected = model(images())
    torch.testing.assert_close(model.cuda()(images().cuda()).cpu(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheme", [*FOLDED, fz.Monarch(blocks=2)], ids=str)
def test_the_decomposition_is_the_same_on_both_devices(scheme: Scheme) -> None:
    made = scheme.at_rank(KernelShape.of((24, 30)), 3)
    weights = torch.randn(4, 24, 30, dtype=torch.float64)
    here, there = (made.compose(made.decompose(part)) for part in (weights, weights.cuda()))
    torch.testing.assert_close(there.cpu(), here, rtol=1e-9, atol=1e-9)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.05, momentum=0.9)
    fz.FrobeniusDecay(model, 0.05).attach(optimizer)
    return optimizer


@pytest.mark.parametrize("make", [sgd, adamw, flambe])
@pytest.mark.parametrize("kind", SCHEMES)
def test_a_captured_step_with_decay_ends_where_eager_steps_do(kind: str, make: object) -> None:
    start = tensorized(kind).cuda()
    start.get_parameter("0.bias").requires_grad_(False)  # a norm follows: its gradient is rounding
    eager, replayed = (trained(start, make, captured=captured) for captured in (False, True))  # type: ignore[arg-type]
    for (name, expected), actual in zip(eager.named_parameters(), replayed.parameters(), strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("scheme", FOLDED, ids=str)
def test_training_holds_at_most_twice_what_the_dense_layer_does(scheme: Scheme) -> None:
    format = scheme.at_rank(KernelShape.of((1024, 1024)), 16)
    x = torch.randn(256, 1024, device="cuda")
    peaks = []
    for layer in (nn.Linear(1024, 1024), fz.FactorizedLinear(1024, 1024, format)):
        torch.cuda.synchronize()
        layer = layer.cuda()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer(x).square().sum().backward()
        held = sum(parameter.numel() * 4 for parameter in layer.parameters())
        peaks.append(torch.cuda.max_memory_allocated() - before + held)
    assert peaks[1] <= 2 * peaks[0]
