"""What every layer with a tensor for its weight has to do, beside the contract of all composed layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from factorized.decay.forms import TensorForm, forms
from tests.composed_contract import Case, ComposedContract, error


class TensorContract(ComposedContract):
    """The tests every tensorized layer passes; ``cases`` is the subclass's."""

    def full_rank(self, case: Case) -> tuple[int, ...]:
        return case.factorize(case.make_dense()).folding.full_ranks

    def parameter_names(self, case: Case) -> list[str]:
        layer = case.factorize(case.make_dense())
        depthwise = ["depthwise"] if case.options.get("separable") else []
        return [*(f"cores.{n}" for n in range(len(layer.format.core_shapes))), *depthwise]

    def test_its_frobenius_gradient_is_autograds(self, case: Case) -> None:
        layer = case.make_layer()
        expected = torch.autograd.grad(0.5 * layer.product.square().sum(), list(layer.cores))
        for way in (layer.format.gradients, layer.format.contracted_gradients):
            for actual, reference in zip(way([core.detach() for core in layer.cores]), expected, strict=True):
                assert error(actual, reference) < 1e-12

    def test_its_form_is_the_tensor(self, case: Case) -> None:
        layer = case.make_layer()
        (form,) = forms(nn.Sequential(layer))
        assert isinstance(form, TensorForm)
        assert (form.name, form.kind, form.layer) == ("0", case.options.get("method", "tensor_train"), layer)
        assert [factor.parameter for factor in form.factors] == list(layer.cores)
        product = layer.product
        assert error(form.norm_squared(form.values), product.square().sum()) < 1e-12
        assert error(form.compose(form.values).square().sum(), product.square().sum()) < 1e-12

    def test_every_execution_computes_the_same_forward_and_backward(self, case: Case) -> None:
        layer, x = case.make_layer(), case.make_input(3)
        results: list[Any] = []
        for execution in layer.executions:
            layer.execution = execution
            y = layer(x)
            leaves = [x, *layer.parameters()]
            weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
            results.append((y, *torch.autograd.grad((y * weights).sum(), leaves)))
        for result in results[1:]:
            for actual, expected in zip(result, results[0], strict=True):
                assert error(actual, expected) < 1e-11

    def test_drawn_cores_give_the_weight_the_variance_of_the_dense_init(self, case: Case) -> None:
        dense = case.make_dense()
        reference = torch.empty(dense.weight.shape)
        size = reference[0, 0].numel()
        fills: dict[Any, Callable[[], object]] = {
            "default": lambda: nn.init.kaiming_uniform_(reference, a=5**0.5),
            "kaiming": lambda: nn.init.kaiming_normal_(reference),
            "normal": lambda: reference.normal_(0, (2 / (len(reference) * size)) ** 0.5),
            nn.init.ones_: lambda: reference.fill_(1),
        }
        for init, fill in fills.items():
            torch.manual_seed(2)
            layer = case.factorize(dense, init=init)
            torch.manual_seed(2)
            fill()
            # a depthwise kernel is independent of the pointwise one: their mean squares multiply
            taps = 1 if layer.depthwise is None else layer.depthwise.square().mean()
            assert error(layer.product.square().mean() * taps, reference.square().mean()) < 1e-5
            norms = [core.norm().item() for core in layer.cores]
            assert max(norms) < 1.001 * min(norms)

    def test_its_repr_says_what_it_saves(self, case: Case) -> None:
        layer = case.make_layer()
        used, dense = sum(factor.numel() for factor in layer.factors), case.make_dense().weight.numel()
        assert repr(layer).startswith(f"{case.factorized.__name__}(")
        assert f"method={layer.method}, dims={layer.dims}" in repr(layer)
        assert repr(layer).endswith(f"rank={layer.rank}, params={used:,} of {dense:,})")
