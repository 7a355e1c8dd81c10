from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from factorized import FactorizedLinear, LowRank, Monarch, TensorTrain, Tucker
from factorized.formats import format
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
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_ranks_that_a_gpu_pads_change_nothing(
    monkeypatch: pytest.MonkeyPatch, scheme: Scheme, transposed: bool
) -> None:
    kind, shape = (Conv1D, (12, 20)) if transposed else (nn.Linear, (20, 12))
    held = scheme.at_rank(scheme.kernel(shape), 5)
    layer = FactorizedLinear(12, 20, held, execution="chain", dense_type=kind, dtype=torch.float64)
    x = torch.randn(3, 12, dtype=torch.float64)
    expected = layer(x)
    gradients = torch.autograd.grad(expected.square().sum(), layer.factors)
    between: list[int] = []
    real = format.aligned

    def noted(weights: Sequence[Tensor]) -> list[Tensor]:
        padded = real(weights)
        between.extend(weight.shape[1] for weight in padded[1:])
        return padded

    monkeypatch.setattr(format, "gains_from_alignment", lambda *_: True)
    monkeypatch.setattr(format, "aligned", noted)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(torch.autograd.grad(layer(x).square().sum(), layer.factors), gradients)
    assert all(size % 8 == 0 for size in between)
    assert between or not isinstance(scheme, LowRank)  # block-diagonal chains stay as they are
