from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d, FactorizedEmbedding, FactorizedLinear
from factorized.formats.kernel import KernelShape
from factorized.nn.layer import FactorizedLayer

# A layer for an initialization, its output channels times kernel positions, its columns per group, its rank.
Make = Callable[[Any], FactorizedLayer]
LAYERS: dict[str, tuple[Make, int, int, int]] = {
    "linear": (lambda init: FactorizedLinear(400, 300, 60, init=init), 300, 400, 60),
    "conv1d": (lambda init: FactorizedConv1d(60, 90, 5, 40, init=init), 90 * 5, 60 * 5, 40),
    "conv2d": (lambda init: FactorizedConv2d(70, 90, (3, 2), 50, init=init), 90 * 6, 70 * 2, 50),
    "conv2d-channel": (lambda init: FactorizedConv2d(40, 90, 3, 50, kind="channel", init=init), 90 * 9, 40 * 9, 50),
    "conv2d-groups": (lambda init: FactorizedConv2d(80, 90, 3, 50, groups=2, init=init), 90 * 9, 40 * 3, 50),
    "conv3d": (lambda init: FactorizedConv3d(20, 60, 3, 70, init=init), 60 * 27, 20 * 9, 70),
    "embedding": (lambda init: FactorizedEmbedding(300, 200, 40, init=init), 300, 200, 40),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=LAYERS)
def layer_kind(request: pytest.FixtureRequest) -> tuple[Make, int, int, int]:
    return LAYERS[request.param]


def assert_normal(factor: Tensor, deviation: float) -> None:
    assert factor.std().item() == pytest.approx(deviation, rel=0.05)
    assert abs(factor.mean().item()) < 0.05 * deviation
    assert factor.abs().max() > 3 * deviation  # a uniform distribution ends at √3


def assert_uniform(factor: Tensor, bound: float) -> None:
    assert 0.98 * bound < factor.abs().max() <= bound
    assert factor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_kaiming_draws_each_factor_for_its_own_fan_in(layer_kind: tuple[Make, int, int, int]) -> None:
    make, _, columns, rank = layer_kind
    layer = make("kaiming")
    assert_normal(layer.U, math.sqrt(2 / rank))
    assert_normal(layer.V, math.sqrt(2 / columns))


def test_normal_draws_both_factors_for_the_layers_fan_out(layer_kind: tuple[Make, int, int, int]) -> None:
    make, fan_out, _, _ = layer_kind
    layer = make("normal")
    assert_normal(layer.U, math.sqrt(2 / fan_out))
    assert_normal(layer.V, math.sqrt(2 / fan_out))


def test_default_draws_the_factors_as_torch_draws_layers(layer_kind: tuple[Make, int, int, int]) -> None:
    make, _, columns, rank = layer_kind
    layer = make("default")
    assert_uniform(layer.V, 1 / math.sqrt(columns))
    if isinstance(layer, FactorizedEmbedding):
        assert_normal(layer.U, 1)
    else:
        assert_uniform(layer.U, 1 / math.sqrt(rank))


@pytest.mark.parametrize(
    "scheme", [fz.TensorTrain(), fz.Tucker(), fz.Monarch(), fz.Kronecker(), fz.Residual(fz.Kronecker())], ids=str
)
def test_default_draws_a_table_without_thin_rows_with_the_variance_of_torchs(scheme: Any) -> None:
    layer = FactorizedEmbedding(300, 200, scheme.at_scale(KernelShape(300, 200), 0.5), init="default")
    assert layer.weight.detach().square().mean().item() == pytest.approx(1, rel=0.05)


def test_default_draws_the_thin_rows_of_a_residual_as_torch_draws_a_table() -> None:
    format = fz.Residual().at_rank(KernelShape(300, 200), 40)
    layer = FactorizedEmbedding(300, 200, format, padding_idx=7, init="default")
    assert_normal(layer.U[8:], 1)
    assert not layer.weight[7].any()


def test_a_callable_gets_every_matrix_of_every_group() -> None:
    shapes = []

    def fill(matrix: Tensor) -> None:
        assert matrix.is_contiguous()
        shapes.append(tuple(matrix.shape))
        matrix.fill_(len(shapes))

    layer = FactorizedConv2d(4, 6, (3, 5), 2, groups=2, init=fill)
    assert shapes == [(9, 2), (9, 2), (2, 10), (2, 10)]
    assert layer.U.tolist() == [[1, 1]] * 9 + [[2, 2]] * 9
    assert layer.V.tolist() == [[3, 3]] * 10 + [[4, 4]] * 10


@pytest.mark.parametrize(
    "init",
    [
        torch.randn_like,
        lambda matrix: None,
        lambda matrix: matrix[:-1].zero_(),
        lambda matrix: matrix.mul_(0.1),
        lambda matrix: setattr(matrix, "data", torch.zeros_like(matrix)),
    ],
)
@pytest.mark.parametrize("format", [2, fz.Tucker().at_rank(KernelShape.of((6, 4, 3, 3)), 2)], ids=["product", "tucker"])
def test_a_callable_that_leaves_entries_unfilled_is_refused(init: Any, format: Any) -> None:
    dense = nn.Conv2d(4, 6, 3)
    with pytest.raises(ValueError, match=r"init must fill the tensor .* in place, .* left entries of a \d+x\d+"):
        FactorizedConv2d.from_dense(dense, format, init=init)


def test_heads_that_a_callable_leaves_unfilled_are_refused() -> None:
    with pytest.raises(ValueError, match=r"init must fill the tensor .* but randn_like left entries of a 4x8 tensor"):
        fz.factorize_attention(nn.MultiheadAttention(8, 2), rank_scale=0.5, init=torch.randn_like)


def test_orthogonal_factors_are_orthogonal_in_every_group() -> None:
    layer = FactorizedConv2d(8, 6, 3, 4, groups=2, init=nn.init.orthogonal_)
    for part in (*layer.U.chunk(2), *layer.V.chunk(2)):
        torch.testing.assert_close(part.mT @ part, torch.eye(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("init", ["spectral", "default", "kaiming", "normal", nn.init.xavier_uniform_])
def test_inner_matrices_start_as_identities(init: Any) -> None:
    layer = FactorizedConv2d(4, 6, 3, 5, groups=2, depth=2, init=init)
    for M in layer.inner:
        assert M.tolist() == torch.eye(5).repeat(2, 1).tolist()


@pytest.mark.parametrize("init", ["spectral", "default", "kaiming", "normal", nn.init.ones_])
def test_every_initialization_makes_padding_zero(init: Any) -> None:
    layer = FactorizedEmbedding(9, 6, 3, padding_idx=-2, init=init)
    assert layer(torch.tensor([7])).abs().max() < 1e-6
    assert layer(torch.tensor([6])).abs().max() > 1e-3


def test_redrawing_gives_other_factors_and_another_bias() -> None:
    layer = FactorizedLinear(6, 5, 3, init="kaiming")
    before = [parameter.clone() for parameter in layer.parameters()]
    layer.reset_parameters("kaiming")
    assert not any(torch.equal(old, new) for old, new in zip(before, layer.parameters(), strict=True))


def test_drawn_factors_ignore_the_weight_they_replace() -> None:
    dense = nn.Linear(6, 5)
    torch.manual_seed(1)
    first = FactorizedLinear.from_dense(dense, 3, "kaiming")
    nn.init.zeros_(dense.weight)
    torch.manual_seed(1)
    second = FactorizedLinear.from_dense(dense, 3, "kaiming")
    assert torch.equal(first.weight, second.weight)
    assert first.weight.abs().max() > 0


@pytest.mark.parametrize("init", ["svd", "Kaiming", "", 3])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_unknown_initialization_is_refused(init: Any, device: str) -> None:
    message = r'init must be one of "spectral", "default", "kaiming", "normal" or a callable .* got'
    dense = nn.Linear(6, 5, device=device)
    with pytest.raises(ValueError, match=message):
        FactorizedLinear.from_dense(dense, 3, init)
    with pytest.raises(ValueError, match=message):
        FactorizedLinear(6, 5, 3, init=init, device=device)
    with pytest.raises(ValueError, match=message):
        FactorizedLinear.from_dense(dense, 3).reset_parameters(init)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    dense = nn.Linear(6, 5)
    with torch.no_grad():
        dense.weight[2, 3] = value
    with pytest.raises(ValueError, match="weight holds NaN or infinity"):
        FactorizedLinear.from_dense(dense, 3)
