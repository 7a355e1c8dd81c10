"""The CPU kernels of Frobenius decay in use: which products they compute, and what may happen around them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay import native
from factorized.decay.act import FrobeniusEngine
from factorized.decay.batch import batches
from factorized.decay.build import MAX_RANK
from factorized.decay.native import LARGEST
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


@needs_kernels
class TestWhoComputesWhat:
    def kinds(self, model: nn.Module) -> list[str]:
        return [type(unit).__name__ for unit in batches(fz.forms(model))]

    def test_all_products_of_a_type_are_computed_by_one_call(self) -> None:
        assert self.kinds(products()) == ["Native"]
        assert self.kinds(nn.ModuleList([products(), products(torch.float64)])) == ["Native", "Native"]

    @pytest.mark.parametrize(
        "module",
        [
            pytest.param(fz.FactorizedLinear(9, 7, 2, depth=1), id="deep"),
            pytest.param(fz.FactorizedLinear(8, 8, 8), id="overcomplete"),
            pytest.param(fz.FactorizedConv2d(8, 12, 3, 2, groups=2), id="groups"),
            pytest.param(fz.FactorizedLinear(9, 7, 2).bfloat16(), id="half"),
            pytest.param(fz.FactorizedLinear(900, 900, MAX_RANK + 1), id="rank"),
            pytest.param(fz.FactorizedLinear(LARGEST // 2, 9, 2, bias=False, init=None), id="large"),
            pytest.param(fz.FactorizedLinear(9, 7, 2, device="meta", init=None), id="meta"),
        ],
    )
    def test_what_they_do_not_know_is_left_to_torch(self, module: nn.Module) -> None:
        assert "Native" not in self.kinds(nn.ModuleList([module, deepcopy(module)]))

    def test_a_lone_product_is_left_to_torch(self) -> None:
        assert self.kinds(products(shapes=SHAPES[:1])) == ["Single"]
        assert self.kinds(products(shapes=SHAPES[:2])) == ["Native"]

    def test_two_types_in_one_product_are_left_to_torch(self) -> None:
        model = products(shapes=[(9, 7, 2)] * 2)
        for layer in model:
            layer.U = nn.Parameter(layer.U.detach().double())
        assert "Native" not in self.kinds(model)

    def test_a_parameter_in_two_places_is_left_to_torch(self) -> None:
        model = products(torch.float64, [(12, 12, 3)] * 4)
        model[1].U = model[0].V
        assert sorted(self.kinds(model)) == ["Batch", "Native"]
        assert error_of_applying(model) < 1e-14

    def test_a_subclass_of_parameters_is_left_to_torch(self) -> None:
        class Marked(nn.Parameter):
            pass

        model = products(shapes=[(9, 7, 2)] * 2)
        for layer in model:
            layer.U = Marked(layer.U.detach())
        assert "Native" not in self.kinds(model)


@needs_kernels
class TestAroundThem:
    def test_a_factor_that_is_not_contiguous(self) -> None:
        model = products()
        for layer in model:
            layer.V.data = layer.V.data.T.contiguous().T
        assert not all(parameter.is_contiguous() for parameter in model.parameters())
        assert error_of_applying(model) < TOLERANCE[torch.float32]

    def test_a_gradient_that_is_not_contiguous(self) -> None:
        model = with_gradients(products())
        expected, before = exact(model), {p: p.grad.double() for p in model.parameters()}
        for parameter in model.parameters():
            parameter.grad = parameter.grad.T.contiguous().T
        fz.FrobeniusDecay(model, 0.3).apply_()
        for parameter, gradient in expected.items():
            assert error(parameter.grad, before[parameter] + 0.3 * gradient) < TOLERANCE[torch.float32]

    def test_a_gradient_that_is_negated_when_read_is_not_written_as_it_lies(self) -> None:
        model = with_gradients(products())
        for parameter in model.parameters():
            parameter.grad = torch._neg_view(parameter.grad)
        with pytest.raises(RuntimeError, match="negation"):  # torch's own, of its optimizers too
            fz.FrobeniusDecay(model, 0.3).apply_()

    def test_targets_of_another_type(self) -> None:
        model = products()
        targets = {parameter: torch.zeros(parameter.shape, dtype=torch.float64) for parameter in model.parameters()}
        FrobeniusEngine(fz.forms(model)).add(lambda factor: targets[factor.parameter], lambda factor: 1.0)
        for parameter, gradient in exact(model).items():
            assert error(targets[parameter], gradient) < TOLERANCE[torch.float32]

    def test_autograd_sees_that_a_gradient_was_changed(self) -> None:
        model = with_gradients(products())
        decay = fz.FrobeniusDecay(model, 0.3)
        versions = [parameter.grad._version for parameter in model.parameters()]
        decay.apply_()
        assert all(p.grad._version > version for p, version in zip(model.parameters(), versions, strict=True))

    def test_gradients_made_in_inference_mode(self) -> None:
        model = products()
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            fz.FrobeniusDecay(model, 1.0).apply_()
        for parameter, gradient in exact(model).items():
            assert error(parameter.grad, gradient) < TOLERANCE[torch.float32]

    def test_a_strength_of_zero_adds_nothing_of_what_is_not_finite(self) -> None:
        model = with_gradients(products())
        before = [parameter.grad.clone() for parameter in model.parameters()]
        model[0].U.data.fill_(torch.nan)
        fz.FrobeniusDecay(model, lambda step: 0.0).apply_()
        assert all(torch.equal(p.grad, start) for p, start in zip(model.parameters(), before, strict=True))

    def test_much_work_is_given_as_many_threads_as_torch_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[object, ...]] = []
        monkeypatch.setattr(native, "cpu_kernels", lambda dtype: lambda *arguments: calls.append(arguments))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
        fz.FrobeniusDecay(with_gradients(products()), 1.0).apply_()
        fz.FrobeniusDecay(with_gradients(products(shapes=[(50, 50, 3)] * 9)), 1.0).apply_()
        assert [arguments[-1] for arguments in calls] == [
            7,
            1,
        ]

    def test_memory_that_moves_is_found_again(self) -> None:
        model = products()
        decay = fz.FrobeniusDecay(model, 1.0)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.data = parameter.data + 0.01
                parameter.grad = torch.zeros_like(parameter)
            decay.apply_()
            for parameter, gradient in exact(model).items():
                assert error(parameter.grad, gradient) < TOLERANCE[torch.float32]

    @pytest.mark.parametrize("copy", [deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
    def test_copies_of_a_decay_act_on_copies_of_the_model(self, copy: Callable[..., tuple[nn.Module, object]]) -> None:
        model = products()
        twin, decay = copy((model, fz.FrobeniusDecay(model, 1.0)))
        assert isinstance(decay, fz.FrobeniusDecay)
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.grad = torch.zeros_like(parameter)
        decay.apply_()
        assert not any(parameter.grad.any() for parameter in model.parameters())
        for parameter, gradient in exact(twin).items():
            assert error(parameter.grad, gradient) < TOLERANCE[torch.float32]

    def test_training_is_what_it_is_without_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def train(decoupled: bool, lr: float | Tensor) -> list[Tensor]:
            model = products(torch.float64, [(12, 9, 3)] * 4 + [(30, 20, 5)])
            model[1].U.requires_grad_(False)
            groups = fz.parameter_groups(model, weight_decay=0.01)
            optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
            fz.FrobeniusDecay(model, 0.3, decoupled=decoupled).attach(optimizer)
            for step in range(3):
                optimizer.zero_grad()
                sum((layer.weight**4).sum() for layer in model[step % 2 :]).backward()
                optimizer.step()
            return [parameter.detach() for parameter in model.parameters()]

        cases = [(decoupled, lr) for decoupled in (False, True) for lr in (0.01, torch.tensor(0.01))]
        by_kernels = [train(*case) for case in cases]
        monkeypatch.setattr(native, "cpu_kernels", lambda dtype: None)
        for actual, reference in zip(by_kernels, [train(*case) for case in cases], strict=True):
            torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)
