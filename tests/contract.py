"""What every low-rank layer has to do. A layer's test file subclasses ``LayerContract`` and gives its cases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from factorized.layers.base import FactorizedLayer
from factorized.maths.frobenius import frobenius_gradients
from factorized.maths.kernel import grouped, to_matrix
from tests.composed_contract import Case, ComposedContract, error, gradients, only, trained_like

__all__ = ["Case", "LayerContract", "error", "gradients", "only", "trained_like"]


class LayerContract(ComposedContract):
    """The tests every low-rank layer passes; ``cases`` is the subclass's."""

    def full_rank(self, case: Case) -> int:
        return case.factorize(case.make_dense()).shape.full_rank

    def parameter_names(self, case: Case) -> list[str]:
        return ["U", "V", *(f"inner.{n}" for n in range(case.options.get("depth", 0)))]

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
    def test_above_full_rank_it_still_starts_as_the_dense_layer(
        self, case: Case, dtype: torch.dtype, tolerance: float
    ) -> None:
        dense, x = case.make_dense(dtype), case.make_input(3, dtype=dtype)
        full_rank = case.factorize(dense).shape.full_rank
        for weight in (dense.weight.detach(), trained_like(dense.weight.detach())):
            dense.weight = nn.Parameter(weight)
            expected = dense(x)
            largest = (case.factorize(dense, full_rank + 3)(x) - expected).abs().max() / expected.abs().max()
            assert largest < tolerance

    def test_below_full_rank_it_starts_as_the_best_approximation(self, case: Case) -> None:
        dense = case.make_dense()
        dense.weight = nn.Parameter(trained_like(dense.weight.detach()))
        rank = max(1, case.factorize(dense).shape.full_rank // 2)
        layer = case.factorize(dense, rank)
        spectrum = torch.linalg.svdvals(to_matrix(dense.weight.detach(), layer.shape)).square()
        squared_error = (layer.weight - dense.weight).square().sum()
        assert abs(squared_error - spectrum[:, rank:].sum()) < 1e-12 * spectrum.sum()
        torch.testing.assert_close(grouped(layer.U, layer.shape.groups).square().sum(-2), spectrum[:, :rank].sqrt())

    def test_its_frobenius_gradient_is_autograds(self, case: Case) -> None:
        layer = case.make_layer()
        U, *inner, V = (grouped(factor, layer.shape.groups) for factor in layer.factors)
        by_U, by_V, by_inner = frobenius_gradients(U, V, inner)
        expected = torch.autograd.grad(0.5 * layer.weight.square().sum(), layer.factors)
        for actual, reference in zip((by_U, *by_inner, by_V), expected, strict=True):
            assert error(actual.flatten(0, 1), reference) < 1e-12

    def test_a_default_device_does_not_misplace_surplus_columns(self, case: Case) -> None:
        dense = case.make_dense()
        with torch.device("meta"):
            layer = case.factorize(dense, self.full_rank(case) + 1)
        assert error(layer.weight, dense.weight) < 1e-12

    def test_its_repr_says_what_it_saves(self, case: Case) -> None:
        layer: FactorizedLayer = case.make_layer()
        used, dense = sum(factor.numel() for factor in layer.factors), case.make_dense().weight.numel()
        assert repr(layer).startswith(f"{case.factorized.__name__}(")
        depth = f", depth={layer.depth}" if layer.depth else ""
        assert repr(layer).endswith(f"rank={case.rank}{depth}, params={used:,} of {dense:,})")
