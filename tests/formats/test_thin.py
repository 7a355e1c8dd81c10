"""Low-rank 3×3 convolutions by custom kernels: where they apply, and, by Triton's interpreter, that they are right."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from factorized.formats import thin
from factorized.formats.convolution import Geometry
from factorized.formats.kernel import KernelShape
from factorized.formats.thin import applies

INTERPRETED = """
import random
import torch
import torch.nn.functional as F
from factorized.formats.kernel import KernelShape, to_kernel
from factorized.formats.thin import _thin_convolution

random.seed(0), torch.manual_seed(0)
for dtype, most in [(torch.float32, 1e-6), (torch.float16, 2e-3)] * 6:
    n, i, o = random.randint(1, 3), random.choice([3, 16, 20, 70]), random.choice([5, 24, 64, 72])
    h, w, rank = random.randint(3, 9), random.randint(3, 9), random.choice([1, 2, 9, 16, 18, 37, 70])
    stride = random.choice([(1, 1), (2, 2), (2, 1)])
    padding = random.choice([(0, 0, 0, 0), (1, 1, 1, 1), (1, 2, 0, 1), (2, 2, 2, 2)])
    x = torch.randn(n, i, h, w).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    U = (torch.randn(o * 3, rank) / (3 * rank) ** 0.5).requires_grad_()
    V = (torch.randn(i * 3, rank) / (3 * i) ** 0.5).requires_grad_()
    y = _thin_convolution(x, U, V, list(stride), list(padding))[0]
    dy = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, (x, U, V), dy)]
    x, U, V = (tensor.detach().double().requires_grad_() for tensor in (x, U, V))
    kernel = to_kernel((U @ V.mT)[None], KernelShape.of((o, i, 3, 3)))
    top, bottom, left, right = padding
    y = F.conv2d(F.pad(x, (left, right, top, bottom)), kernel, stride=stride)
    expected = [y, *torch.autograd.grad(y, (x, U, V), dy.double())]
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape
        assert (actual.double() - wanted).norm() < most * wanted.norm(), (n, i, o, h, w, rank, stride, padding, dtype)
"""


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="Triton's interpreter needs an older NumPy")
def test_interpreted_kernels_compute_outputs_and_gradients_of_float64() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", INTERPRETED], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_on_a_cpu_they_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin, "ENABLED", True)
    x = torch.randn(1, 4, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    U, V = torch.randn(18, 2, dtype=torch.bfloat16), torch.randn(12, 2, dtype=torch.bfloat16)
    geometry = Geometry((1, 1), ((1, 1), (1, 1)), (1, 1))
    assert not applies(x, U, V, KernelShape.of((6, 4, 3, 3)), geometry)
