"""Large products, computed with rounded factors: the worker itself, with a product that the CPU has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay import engine, rounded
from factorized.decay.rounded import Rounded
from tests.on_gpu import decayed_gradients, exact

ERROR = 4e-3  # of bfloat16: factors, their Gram matrices


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_product(target: Tensor, factor: Tensor, gram: Tensor, number: float) -> None:
        assert factor.dtype == gram.dtype == torch.bfloat16
        target.addmm_(factor.float(), gram.float(), alpha=number)

    monkeypatch.setattr(rounded, "_add_product", add_product)
    monkeypatch.setattr(engine, "is_large", lambda form: form.left.parameter.shape[1] > 8)


def products(count: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(fz.FactorizedLinear(40, 60, 12, bias=False) for _ in range(count))
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
        parameter.grad = torch.ones_like(parameter)
    return layers


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("most", [1, 2 * 1200, rounded.MOST])
def test_gradients_are_added_however_many_are_held_rounded(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(rounded, "MOST", most)
    model = products()
    decay = fz.FrobeniusDecay(model, 0.5)
    assert [type(worker) for worker in decay._engine.workers] == [Rounded]
    decay.apply_()
    for parameter, want in zip(model.parameters(), exact(model), strict=True):
        assert error(parameter.grad.double() - 1, 0.5 * want) < ERROR


def test_frozen_factors_and_strengths_of_zero_are_left_out() -> None:
    model = products()
    model[0].U.requires_grad_(False)
    fz.FrobeniusDecay(model, {"0": 0.5, "1": 0.0, "2": 2.0}).apply_()
    numbers = [0.0, 0.5, 0.0, 0.0, 2.0, 2.0]
    for parameter, number, want in zip(model.parameters(), numbers, exact(model), strict=True):
        assert (parameter.grad.double() - 1 - number * want).norm() <= ERROR * number * want.norm()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_factors_can_be_shrunk_themselves(as_tensor: bool) -> None:
    model = products()
    before, wanted = [parameter.detach().clone() for parameter in model.parameters()], exact(model)
    fz.FrobeniusDecay(model, 0.5, decoupled=True).apply_(torch.tensor(0.01) if as_tensor else 0.01)
    for parameter, old, want in zip(model.parameters(), before, wanted, strict=True):
        assert error((parameter.detach() - old).double(), -0.005 * want) < ERROR


def test_a_factor_of_two_products_is_not_changed_before_both_are_read() -> None:
    model = products(2)
    model[1].V = model[0].V
    assert Rounded not in {type(worker) for worker in fz.FrobeniusDecay(model, 0.5)._engine.workers}


def test_a_compiled_decay_is_not_rounded() -> None:
    model = products()
    for got, want in zip(decayed_gradients(model, compiled=True), exact(model), strict=True):
        assert error(got.double() - 1, 0.1 * want) < 1e-6


def test_only_large_float32_products_on_a_gpu_are_rounded() -> None:
    form = fz.forms(fz.FactorizedLinear(4096, 4096, 512))[0]
    assert not rounded.is_large(form)
