"""Peak memory by tensors; ``tests/nn/test_tensor_memory.py`` measures layers with it."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from factorized._torch import is_traced
from factorized.experiments.bench.memory import PeakMemory, TensorMemory
from factorized.experiments.models.normalized.layers import activate
from tests.on_gpu import needs_cuda

MEGABYTE = 2**20


def peak_of(device: torch.device) -> tuple[int, int]:
    with PeakMemory(device) as first:
        held = torch.ones(MEGABYTE // 4, device=device)
        (torch.ones(MEGABYTE // 2, device=device) + 1).sum()  # two tensors of two megabytes, freed again
    with PeakMemory(device) as warm:
        kept = torch.ones(MEGABYTE // 4, device=device)
        torch.ones(MEGABYTE, device=device).sum()
        warm.restart()
        (kept + held).sum()
    return first.bytes, warm.bytes


def test_the_peak_is_of_what_is_held_at_once() -> None:
    first, warm = peak_of(torch.device("cpu"))
    assert 5 * MEGABYTE <= first < 5.1 * MEGABYTE
    assert (
        2 * MEGABYTE <= warm < 2.1 * MEGABYTE
    )  # what was kept, and a sum; neither what came before nor what was freed


@needs_cuda
def test_the_peak_of_a_gpu_is_that_of_its_allocator() -> None:
    first, warm = peak_of(torch.device("cuda"))
    assert 5 * MEGABYTE <= first < 40 * MEGABYTE
    assert 2 * MEGABYTE <= warm < 40 * MEGABYTE  # memory is reserved in blocks


def test_code_works_in_place_while_it_is_measured_as_it_does_without() -> None:
    norm, x = nn.BatchNorm2d(8).eval(), torch.zeros(32, 8, 32, 32)  # one megabyte
    with torch.no_grad(), PeakMemory(torch.device("cpu")) as memory:
        for _ in range(2):
            memory.restart()
            activate(norm, x)
    assert MEGABYTE <= memory.bytes < 1.1 * MEGABYTE  # what the norm returns becomes the result


def test_only_modes_that_watch_change_nothing() -> None:
    class Other(TorchDispatchMode):
        pass

    for modes, traced in (([TensorMemory()], False), ([Other()], True), ([TensorMemory(), Other()], True)):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            assert is_traced() == traced
    with FakeTensorMode(), TensorMemory():
        assert is_traced()


def test_parameters_gradients_and_moments_count() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        model = nn.Linear(512, 512, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(2):
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
    assert memory.bytes >= 4 * MEGABYTE  # weight, gradient and two moments
