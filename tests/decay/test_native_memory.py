"""The CPU kernels of Frobenius decay and memory that is not what it was, or not what it seems."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import factorized as fz
from factorized.decay import native
from tests.contract import error
from tests.decay.native_products import (
    SHAPES,
    TOLERANCE,
    error_of_applying,
    exact,
    needs_kernels,
    products,
    with_gradients,
)

pytestmark = needs_kernels
STRENGTH = 0.3


class TestShapesThatChange:
    def test_factors_cut_to_a_smaller_rank_are_decayed_as_they_are(self) -> None:
        model = products(shapes=[(48, 64, 8)] * 4)
        decay = fz.FrobeniusDecay(model, STRENGTH)
        decay._engine.add(lambda factor: None, lambda factor: 0.0)
        for layer in model:
            layer.U.data, layer.V.data = layer.U.data[:, :3].clone(), layer.V.data[:, :3].clone()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        decay.apply_()
        for layer in model:
            U, V = layer.U.detach().double(), layer.V.detach().double()
            assert error(layer.U.grad, STRENGTH * U @ V.T @ V) < TOLERANCE[torch.float32]

    @pytest.mark.parametrize("shapes", [((512,), (384,)), ((0,), (384,))])
    def test_factors_that_are_flattened_are_an_error(self, shapes: tuple[tuple[int], tuple[int]]) -> None:
        model = products(shapes=[(64, 48, 8)] * 2)
        decay = fz.FrobeniusDecay(model, STRENGTH)
        for layer in model:
            layer.U.data, layer.V.data = (torch.zeros(shape) for shape in shapes)
        with pytest.raises(ValueError, match=r"must be matrices, got shapes .*fully_shard"):
            decay.apply_()

    def test_factors_that_no_longer_fit_are_an_error(self) -> None:
        model = products(shapes=[(64, 48, 8)] * 2)
        decay = fz.FrobeniusDecay(model, STRENGTH)
        for layer in model:
            layer.U.data = torch.zeros(64, 16)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(ValueError, match=r"as many columns as each other, got shapes \[\(64, 16\), \(48, 8\)\]"):
            decay.apply_()

    def test_gradients_of_another_shape_are_an_error(self) -> None:
        model = with_gradients(products(shapes=[(64, 48, 8)] * 2))
        decay = fz.FrobeniusDecay(model, STRENGTH)
        for layer in model:
            layer.U.data, layer.V.data = torch.ones(640, 8), torch.ones(480, 8)  # the gradients stay as they were
        with pytest.raises(RuntimeError):
            decay.apply_()


class TestMemoryInTwoPlaces:
    """What two threads would write to, or one write before another has read it, is left to torch."""

    def forms(self) -> nn.Module:
        return with_gradients(products(torch.float64, [(300, 300, 40)] * 4))

    def test_one_gradient_of_several_factors(self) -> None:
        model = self.forms()
        expected = model[0].U.grad + STRENGTH * sum(exact(model)[layer.U] for layer in model)
        for layer in model:
            layer.U.grad = model[0].U.grad
        fz.FrobeniusDecay(model, STRENGTH).apply_()
        assert error(model[0].U.grad, expected) < 1e-13

    def test_gradients_that_are_the_partners(self) -> None:
        model = self.forms()
        gradients = exact(model)
        expected = [layer.U.detach() + STRENGTH * gradients[layer.V] for layer in model]
        for layer in model:
            layer.U.grad, layer.V.grad = layer.V.detach(), layer.U.detach()
        fz.FrobeniusDecay(model, STRENGTH).apply_()
        for layer, reference in zip(model, expected, strict=True):
            assert error(layer.V.grad, reference) < 1e-13

    def test_factors_tied_by_their_memory(self) -> None:
        model = self.forms()
        for layer in model:
            layer.U.data = model[0].U.data
        gradients = exact(model)
        expected = model[0].U.detach() - 0.1 * STRENGTH * sum(gradients[layer.U] for layer in model)
        fz.FrobeniusDecay(model, STRENGTH, decoupled=True).apply_(lr=0.1)
        assert error(model[0].U, expected) < 1e-13

    def test_factors_of_one_product_tied_by_their_memory(self) -> None:
        model = self.forms()
        for layer in model:
            layer.V.data = layer.U.data
        gradients = exact(model)
        expected = [p.detach() - 0.1 * STRENGTH * 2 * gradients[p] for p in (layer.U for layer in model)]
        fz.FrobeniusDecay(model, STRENGTH, decoupled=True).apply_(lr=0.1)
        for layer, reference in zip(model, expected, strict=True):
            assert error(layer.U, reference) < 1e-13


class TestMemoryThatIsNotWhatItSeems:
    def test_gradients_that_are_wrapped(self) -> None:
        model = products()
        for parameter in model.parameters():
            parameter.grad = TwoTensor(torch.zeros(parameter.shape), torch.zeros(parameter.shape))
        fz.FrobeniusDecay(model, 1.0).apply_()
        for parameter, gradient in exact(model).items():
            assert error(parameter.grad.a, gradient) < TOLERANCE[torch.float32]

    def test_gradients_without_memory_are_not_passed_over(self) -> None:
        model = with_gradients(products())
        model[0].U.grad = torch._efficientzerotensor(model[0].U.shape)
        with pytest.raises(RuntimeError):  # torch's: they cannot be written
            fz.FrobeniusDecay(model, 1.0).apply_()

    def test_factors_that_are_negated_when_read(self) -> None:
        model = products()
        for layer in model:
            layer.U.data = torch._neg_view(layer.U.data)
        assert error_of_applying(model) < TOLERANCE[torch.float32]

    @pytest.mark.parametrize("when", ["made", "applied"])
    @pytest.mark.parametrize("change", [lambda grad: grad, lambda grad: grad.T.contiguous().T], ids=["plain", "copied"])
    def test_a_default_device_is_not_theirs(self, when: str, change: Callable[[Tensor], Tensor]) -> None:
        model = products()
        for parameter in model.parameters():
            parameter.grad = change(torch.zeros_like(parameter))
        with torch.device("meta" if when == "made" else "cpu"):
            decay = fz.FrobeniusDecay(model, 1.0)
        with torch.device("meta" if when == "applied" else "cpu"):
            decay.apply_()
        for parameter, gradient in exact(model).items():
            assert error(parameter.grad, gradient) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("copy", [deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_a_copy_does_without_kernels_where_there_are_none(
    copy: Callable[..., tuple[nn.Module, fz.FrobeniusDecay]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = products(shapes=SHAPES[:4])
    decay = fz.FrobeniusDecay(model, 1.0)
    monkeypatch.setattr(native, "cpu_kernels", lambda dtype: None)
    twin, decay = copy((model, decay))
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decay.apply_()
    for parameter, gradient in exact(twin).items():
        assert error(parameter.grad, gradient) < TOLERANCE[torch.float32]


def test_threads_with_small_stacks_suffice() -> None:
    code = """
import torch, factorized as fz
torch.set_num_threads(2)
model = torch.nn.ModuleList(fz.FactorizedLinear(300, 300, 100, bias=False, dtype=torch.float64) for _ in range(8))
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
decay = fz.FrobeniusDecay(model, 1.0)
for _ in range(20):
    decay.apply_()
print(*{type(unit).__name__ for unit in decay._engine.units})
"""
    environment = {**os.environ, "OMP_STACKSIZE": "128k", "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stdout.split()) == (0, ["Native"]), run.stderr
