"""What tests that run on a GPU share; what they test is tested on the CPU too, where it is not CUDA's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import factorized as fz

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def decayed_gradients(model: nn.Module, *, compiled: bool) -> list[Tensor]:
    """Return the gradients, ones before, after a Frobenius decay that was compiled as a whole, or not."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    apply = fz.FrobeniusDecay(model, 0.1).apply_
    (torch.compile(apply, fullgraph=True, backend="aot_eager") if compiled else apply)()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
