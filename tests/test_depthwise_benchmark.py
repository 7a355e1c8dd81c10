"""``benchmarks.depthwise`` in small: its ways agree with float64, and its kernels do by Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import depthwise
from tests.interpreted import needs_interpreter, run_interpreted

ON_A_CPU = [name for name in depthwise.WAYS if not name.startswith("kernels")]
INTERPRETED = """
import random
import torch
import torch.nn.functional as F
from benchmarks.depthwise import by_kernels

random.seed(0), torch.manual_seed(0)
for dtype, most in [(torch.float32, 1e-6), (torch.float16, 2e-3)] * 4:
    n, h, w = random.randint(1, 3), random.randint(1, 9), random.randint(1, 9)
    c = random.choice([3, 32, 40, 64, 96, 128])
    x = torch.randn(n, c, h, w).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    taps = torch.randn(c, 1, 3, 3, requires_grad=True)
    y = by_kernels(x, taps)
    gradient = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, (x, taps), gradient)]
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, taps)]
    y = F.conv2d(*exact, padding=1, groups=c)
    expected = [y, *torch.autograd.grad(y, exact, gradient.double())]
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape
        assert (actual.double() - wanted).norm() < most * wanted.norm(), (n, c, h, w, dtype)
"""


def test_a_block_is_checked_and_timed_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "REPEATS", 1)
    words = ["--out", str(tmp_path / "found.json"), "--batch", "1", "--blocks", "1", "--device", "cpu"]
    depthwise.main([*words, "--ways", *ON_A_CPU])
    found = json.loads((tmp_path / "found.json").read_text())
    (row,) = found["rows"]
    assert row["case"] == list(depthwise.CASES[0])
    assert row["us"].keys() == row["MiB"].keys() == found["errors"].keys() == set(ON_A_CPU)
    assert min(row["us"].values()) > 0
    assert max(found["errors"].values()) < 0.01


def test_nothing_is_compiled_after_the_deadline(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "found.json"), "--blocks", "1", "--device", "cpu", "--seconds", "0"]
    depthwise.main([*words, "--ways", "convolution"])
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["us"] == {}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_tap_sees_its_neighbour_and_zeros_outside(sign: int) -> None:
    x = torch.arange(6.0).reshape(1, 1, 2, 3)
    up_left = depthwise.shifted(x, sign)[0]
    assert up_left.flatten().tolist() == ([0, 0, 0, 0, 0, 1] if sign == 1 else [4, 5, 0, 0, 0, 0])


@pytest.mark.nightly
@needs_interpreter
def test_interpreted_kernels_compute_outputs_and_gradients_of_float64() -> None:
    run_interpreted(INTERPRETED)
