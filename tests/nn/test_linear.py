from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from factorized import FactorizedLinear, LowRank, Monarch, TensorTrain, Tucker
from factorized.formats import product
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme
from factorized.testing import error

SCHEMES = [LowRank(), TensorTrain(), Tucker(), Monarch(blocks=2)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_it_takes_any_number_of_leading_dimensions(scheme: Scheme) -> None:
    layer = FactorizedLinear(6, 8, scheme.at_rank(KernelShape(8, 6), 2), dtype=torch.float64)
    assert set(layer.executions) == {"composed", "chain"}
    for execution in layer.executions:
        layer.execution = execution
        for leading in [(), (2,), (2, 3), (2, 3, 4), (0,), (0, 3)]:
            x = torch.randn(*leading, 6, dtype=torch.float64)
            assert layer(x).shape == (*leading, 8)
            assert error(layer(x), layer.to_dense()(x)) < 1e-12


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_an_input_of_another_width_is_refused(scheme: Scheme) -> None:
    layer = FactorizedLinear(6, 8, scheme.at_rank(KernelShape(8, 6), 2))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|unflatten|is invalid for input"):
        layer(torch.randn(2, 7))


def test_a_format_for_another_weight_is_refused() -> None:
    format = LowRank().at_rank(KernelShape(6, 8), 2)
    with pytest.raises(ValueError, match="format must be for a weight 8x6 with groups=1, got one for 6x8"):
        FactorizedLinear(6, 8, format)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_rank_that_a_gpu_pads_changes_nothing(monkeypatch: pytest.MonkeyPatch, depth: int, transposed: bool) -> None:
    kind = Conv1D if transposed else nn.Linear
    layer = FactorizedLinear(12, 20, 5, depth=depth, execution="chain", init="normal", dense_type=kind)
    x = torch.randn(3, 12)
    expected = layer(x)
    gradients = torch.autograd.grad(expected.square().sum(), layer.factors)
    ranks = []
    real = product.aligned
    monkeypatch.setattr(product, "gains_from_alignment", lambda *_: True)
    monkeypatch.setattr(product, "aligned", lambda cores: ranks.append(real(cores)[0].shape[1]) or real(cores))
    padded = layer(x)
    assert ranks == [8]
    torch.testing.assert_close(padded, expected)
    torch.testing.assert_close(torch.autograd.grad(padded.square().sum(), layer.factors), gradients)
