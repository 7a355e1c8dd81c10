"""Kernels that are built ahead of their first launch: the same ones, once, and without harm where that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from factorized.formats import launches, thin
from factorized.formats.launches import Builder, Launch
from tests.interpreted import needs_interpreter, run_interpreted

Numbers = tuple[Any, ...]


def numbers(arguments: Sequence[Any]) -> Numbers:
    return tuple(value.dtype if isinstance(value, Tensor) else value for value in arguments)


class Kernel:
    """Stands in for a Triton kernel, and keeps what it is launched with."""

    def __init__(self, name: str, launched: list[Numbers]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.launched.append((self.name, *numbers(arguments), constants))

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Numbers]:
    """Return the launches of thin convolutions, which compute nothing."""
    found: list[Numbers] = []
    names = ("pack_kernel", "convolve_kernel", "gradients_kernel")
    kernels = SimpleNamespace(**{name: Kernel(name, found) for name in names})
    monkeypatch.setitem(sys.modules, "factorized.formats.thin_kernels", kernels)
    return found


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Numbers]:
    """Return what is built ahead, by a builder that needs no GPU."""
    found: list[Numbers] = []

    def build(launch: Launch) -> None:
        found.append((launch.kernel.name, *numbers(launch.arguments), launch.constants))

    monkeypatch.setattr(Launch, "build", build)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(thin, "builder", Builder())
    return found


def run_both_ways(x: Tensor, U: Tensor, V: Tensor, stride: list[int]) -> None:
    y, narrow, packed = torch.ops.factorized.thin_convolution(x, U, V, stride, [1, 1, 0, 1])
    torch.ops.factorized.thin_convolution_backward(y, x, narrow, packed, U.shape[1], stride, [1, 1, 0, 1])


CASES = [(128, 64, 64, 32, 9, [1, 1]), (2, 6, 4, 7, 2, [2, 1]), (64, 128, 256, 16, 32, [2, 2])]


@pytest.mark.parametrize(("batch", "i", "o", "extent", "rank", "stride"), CASES)
def test_the_kernels_built_ahead_are_those_launched(
    batch: int, i: int, o: int, extent: int, rank: int, stride: list[int], launched: list[Numbers], built: list[Numbers]
) -> None:
    def given(device: str) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.empty(batch, i, extent, extent + 1, dtype=torch.bfloat16, device=device)
        return x, torch.empty(o * 3, rank, device=device), torch.empty(i * 3, rank, device=device)

    run_both_ways(*given("cpu"), stride)
    assert len(launched) == 5
    assert not built
    for _ in range(2):
        with FakeTensorMode():
            run_both_ways(*given("cuda"), stride)
    thin.builder.wait()
    assert built == launched[:5]


def test_nothing_is_built_for_other_devices_and_for_sizes_that_are_not_known(
    launched: list[Numbers], built: list[Numbers]
) -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode():
        run_both_ways(torch.empty(3, 4, 8, 8).bfloat16(), torch.empty(18, 2), torch.empty(12, 2), [1, 1])
    unknown = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False).from_tensor(torch.empty(3, 4))
    assert type(unknown.shape[0]) is not int
    thin.builder.ask(lambda x: [Launch(Kernel("any", []), 1, (x,), {})], torch.device("cuda"), unknown)
    thin.builder.wait()
    assert not built


def test_a_kernel_that_cannot_be_built_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    built: list[int] = []

    def fail(number: int) -> list[Launch]:
        if number == 1:
            raise RuntimeError("no such GPU")
        built.append(number)
        return []

    builder = Builder()
    for number in (0, 1, 2, 2):
        builder.ask(fail, torch.device("cuda"), number)
        builder.wait()
    assert built == [0, 2]


def test_a_closed_builder_drops_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    began, go_on, built = launches.Lock(), launches.Lock(), []
    began.acquire(), go_on.acquire()

    def build(number: int) -> list[Launch]:
        began.release()
        go_on.acquire(timeout=10)
        built.append(number)
        return []

    builder = Builder()
    for number in range(3):
        builder.ask(build, torch.device("cuda"), number)
    began.acquire(timeout=10)
    go_on.release()
    builder.close()
    assert built == [0]


FOR_A_GPU = """
import torch
from contextlib import nullcontext
from types import SimpleNamespace
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from factorized.formats import thin
from torch._subclasses import FakeTensorMode

prepared, launched, missed = [], [], []

def launcher(source, metadata):
    prepared.append(metadata.name)
    return lambda *given: launched.append(metadata.name)

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=launcher,
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *given: (1, 1, 32, 0, 1024),
    ),
))
torch.cuda.device = lambda device: nullcontext()

def run(device):
    for i, o, rank, stride in [(64, 64, 9, 1), (64, 128, 19, 2)]:
        x = torch.empty(128, i, 32, 32, dtype=torch.bfloat16, device=device)
        U, V = torch.empty(o * 3, rank, device=device), torch.empty(i * 3, rank, device=device)
        stride, padding = [stride] * 2, [1] * 4
        y, narrow, packed = torch.ops.factorized.thin_convolution(x, U, V, stride, padding)
        torch.ops.factorized.thin_convolution_backward(y, x, narrow, packed, rank, stride, padding)

with FakeTensorMode():
    run("cuda")
thin.builder.wait()
assert len(prepared) == 10, prepared
knobs.runtime.jit_cache_hook = lambda **given: missed.append(given["repr"])
run("cpu")
assert len(launched) == 10, launched
assert not missed, missed
"""


@pytest.mark.nightly
@needs_interpreter
def test_not_interpreted_a_launch_for_a_gpu_finds_its_kernel_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run_interpreted(FOR_A_GPU, interpret=False)
