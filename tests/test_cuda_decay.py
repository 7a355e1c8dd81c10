"""The decay's own GPU kernels: the gradients of the products, for any shapes, types and places in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.decay import fused
from factorized.decay.arena import Arena
from factorized.decay.engine import Alike, make_workers
from factorized.decay.fused import Fused
from factorized.experiments.models.resnet import resnet
from tests.on_gpu import decayed_gradients, needs_cuda
from tests.test_cuda import trained

pytestmark = needs_cuda
SHAPES = [
    (70, 9, 50),
    (130, 37, 200),
    (64, 37, 64),
    (5, 1, 3),
    (200, 60, 90),
    (65, 16, 64),
    (300, 17, 1),
    (129, 64, 640),
]


def products(dtype: torch.dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = [fz.FactorizedLinear(columns, rows, rank) for rows, rank, columns in SHAPES]
    return nn.ModuleList(layers).to(device="cuda", dtype=dtype)


def relative_error(form: fz.Form, left: torch.Tensor, right: torch.Tensor) -> float:
    U, V = form.left.parameter.double(), form.right.parameter.double()
    expected = (U @ (V.mT @ V), V @ (U.mT @ U))
    return max(((got - want).norm() / want.norm()).item() for got, want in zip((left, right), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_those_of_the_products(dtype: torch.dtype) -> None:
    forms = fz.forms(products(dtype))
    gradients = Fused(forms).gradients()
    errors = [relative_error(form, *gradients[2 * n : 2 * n + 2]) for n, form in enumerate(forms)]
    assert max(errors) < 1e-5, errors


def test_they_do_not_vary_from_run_to_run() -> None:
    worker = Fused(fz.forms(products(torch.float32)))
    first = [gradient.clone() for gradient in worker.gradients()]
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(worker.gradients(), first, strict=True))


def test_parameters_that_were_given_other_memory_are_found() -> None:
    model = products(torch.float32)
    forms = fz.forms(model)
    worker = Fused(forms)
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data
    for layer in model[::2]:
        layer.U.data = layer.U.data.t().contiguous().t()  # the same matrix, column by column
    gradients = worker.gradients()
    assert max(relative_error(form, *gradients[2 * n : 2 * n + 2]) for n, form in enumerate(forms)) < 1e-5


def test_what_the_kernels_do_not_know_is_computed_by_torch() -> None:
    assert [Fused in kinds(products(dtype)) for dtype in (torch.float32, torch.float64)] == [True, False]
    assert Arena in kinds(products(torch.float64))
    large = nn.ModuleList([fz.FactorizedLinear(400, 400, 65).cuda() for _ in range(2)])
    assert kinds(large) <= {Alike, Arena}


def test_where_the_kernels_cannot_be_built_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    fused.can_build_kernels.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(fused, "launch", no_compiler)
        assert kinds(products(torch.float32)) <= {Alike, Arena}
    fused.can_build_kernels.cache_clear()
    assert Fused in kinds(products(torch.float32))


def kinds(model: nn.Module) -> set[type]:
    return {type(worker) for worker in make_workers(fz.forms(model))}


def test_the_decay_compiles_whole() -> None:
    got, want = (decayed_gradients(products(torch.float32), compiled=compiled) for compiled in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.05, momentum=0.9)
    decay = fz.FrobeniusDecay(model, 0.05).attach(optimizer)
    assert any(isinstance(worker, Fused) for worker in decay._engine.workers)
    return optimizer


def test_a_captured_step_ends_where_eager_steps_do() -> None:
    torch.manual_seed(0)
    start = fz.factorize(resnet(8), ratio=0.4).cuda()
    eager, replayed = (trained(start, sgd, captured, torch.float32) for captured in (False, True))
    for actual, expected in zip(replayed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
