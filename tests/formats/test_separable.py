from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import factorized as fz
from factorized.formats.folding import TensorScheme
from factorized.formats.format import Call
from factorized.formats.kernel import KernelShape
from factorized.formats.separable import Separable
from factorized.testing import error, gradients

SHAPE = KernelShape.of((6, 4, 3, 3))


def test_a_separable_kernel_is_recovered_and_any_other_approximated_at_its_best() -> None:
    torch.manual_seed(0)
    format = fz.TensorTrain(separable=True).at_rank(SHAPE, (3, 2))  # dims (3, 4, 2): full rank
    assert format.raised() == []
    pointwise, taps = torch.randn(6, 4, 1, 1, dtype=torch.float64), torch.randn(4, 3, 3, dtype=torch.float64)
    assert error(format.compose(format.decompose(pointwise * taps)), pointwise * taps) < 1e-12
    weight = -torch.randn(6, 4, 3, 3, dtype=torch.float64).abs()
    cores = format.decompose(weight)
    depthwise = cores[-1].flatten(1)
    assert (depthwise.max(1).values == depthwise.abs().max(1).values).all()  # the largest tap is positive
    spectrum = torch.linalg.svdvals(weight.flatten(2).transpose(0, 1)).square()
    assert abs((format.compose(cores) - weight).square().sum() - spectrum[:, 1:].sum()) < 1e-10 * spectrum.sum()


@pytest.mark.parametrize("separable", [False, True])
@pytest.mark.parametrize("scheme", [fz.TensorTrain, fz.Tucker])
def test_weights_that_are_zero_still_receive_a_gradient(scheme: type[TensorScheme], separable: bool) -> None:
    torch.manual_seed(0)
    format = scheme(separable=separable).at_rank(SHAPE, 2)
    weight, x = torch.randn(6, 4, 3, 3, dtype=torch.float64), torch.randn(3, 4, 6, 7, dtype=torch.float64)
    weight[:, 1] = 0  # one input channel alone, as pruning leaves it
    if separable:
        assert format.decompose(weight)[-1].flatten(1).norm(dim=1).min() > 0
    dense = nn.Conv2d(4, 6, 3, padding=1).double()
    nn.init.zeros_(dense.weight)
    layer = fz.FactorizedConv2d.from_dense(dense, format)
    assert layer.weight.abs().max() == 0
    assert max(gradient.abs().max() for gradient in gradients(layer, x, list(layer.factors))) > 0


def test_drawn_cores_give_the_mean_square_of_a_dense_weight() -> None:
    torch.manual_seed(0)
    layer = fz.FactorizedConv2d(64, 48, 3, fz.TensorTrain(separable=True).at_rank(KernelShape.of((48, 64, 3, 3)), 8))
    layer.reset_parameters("normal")
    expected = 2 / (48 * 9)  # of the paper's initialization
    assert 0.7 * expected < layer.weight.square().mean().item() < 1.4 * expected


def test_a_decay_and_the_ranks_are_those_of_the_pointwise_part() -> None:
    format = fz.Tucker(separable=True).at_rank(SHAPE, 2)
    assert isinstance(format, Separable)
    assert format.decayed == (format.pointwise, len(format.pointwise.cores))
    assert list(format.cores)[-1] == "depthwise"
    assert format.rank == format.pointwise.rank
    assert [other.rank for other in format.lowered()] == [other.rank for other in format.pointwise.lowered()]
    call = Call(batch=2, before=(8, 8), after=(4, 4))
    assert format.macs(call) == 2 * 4 * 4 * 4 * 9 + format.pointwise.macs(Call(2, (4, 4), (4, 4)))


@pytest.mark.parametrize("scheme", [fz.TensorTrain, fz.Tucker])
def test_near_full_rank_the_pointwise_part_is_counted_and_lowered_as_one_matrix(scheme: type[TensorScheme]) -> None:
    torch.manual_seed(0)
    format = scheme(separable=True, dims=(12, 8)).at_scale(KernelShape.of((12, 8, 3, 3)), 100)
    layer = fz.FactorizedConv2d(8, 12, 3, format, stride=2, padding=1, dtype=torch.float64)
    x, spent = torch.randn(2, 8, 40, 40, dtype=torch.float64), {}
    for way in layer.executions:
        layer.execution = way
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x)
        spent[way] = counter.get_total_flops() // 2
    assert format.macs(Call(2, (40, 40), (20, 20))) == spent["composed"] < spent["chain"]
    lowered: Any = fz.lower(nn.Sequential(layer))[0]  # type: ignore[index]
    assert [tuple(part.weight.shape) for part in lowered] == [(8, 1, 3, 3), (12, 8, 1, 1)]
    assert error(lowered(x), layer(x)) < 1e-12


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({}, KernelShape.of((8, 4, 1, 1)), "needs a kernel larger than one position and groups=1, got 8x4x1x1"),
        ({}, KernelShape.of((8, 2, 3, 3), 2), "and groups=1, got 8x2x3x3 and groups=2"),
        (
            {"dims": (8, 4, 9)},
            KernelShape.of((8, 4, 3, 3)),
            "dims (8, 4, 9) multiply to 288, but the weight 8x4x1x1 has 32 entries",
        ),
    ],
)
def test_what_cannot_be_separated_is_refused(settings: dict[str, Any], shape: KernelShape, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fz.TensorTrain(separable=True, **settings).at_rank(shape, 2)
