"""What tests that run on a GPU share; what they test is tested on the CPU too, where it is not CUDA's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay.engine import Worker
from factorized.decay.plain import Plain

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def decayed_gradients(model: nn.Module, *, compiled: bool) -> list[Tensor]:
    """Return the gradients, ones before, after a Frobenius decay that was compiled as a whole, or not."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    apply = fz.FrobeniusDecay(model, 0.1).apply_
    (torch.compile(apply, fullgraph=True, backend="aot_eager") if compiled else apply)()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def exact(model: nn.Module) -> list[Tensor]:
    """Return the gradients of half the squared norms in float64, in the order of the parameters."""
    gradients = []
    for form in fz.forms(model):
        U, V = form.left.parameter.detach().double(), form.right.parameter.detach().double()
        gradients += [U @ (V.mT @ V), V @ (U.mT @ U)]
    return gradients


def kinds(workers: Sequence[Worker]) -> list[type]:
    """Return the classes of a decay's workers, and of the parts of those that torch computes."""
    found = [worker.parts if isinstance(worker, Plain) else [worker] for worker in workers]
    return [type(part) for parts in found for part in parts]
