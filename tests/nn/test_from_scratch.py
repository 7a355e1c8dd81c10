from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from factorized import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d, FactorizedEmbedding, FactorizedLinear
from factorized.nn.layer import FactorizedLayer

Make = Callable[..., FactorizedLayer]
# A layer for a rank and what else is said, and the shapes of U, of an inner matrix and of V at rank 3.
LAYERS: dict[str, tuple[Make, list[tuple[int, int]]]] = {
    "linear": (lambda rank, **more: FactorizedLinear(6, 5, rank, **more), [(5, 3), (3, 3), (6, 3)]),
    "conv1d": (lambda rank, **more: FactorizedConv1d(4, 6, 5, rank, **more), [(6, 3), (3, 3), (20, 3)]),
    "conv2d": (
        lambda rank, **more: FactorizedConv2d(4, 6, (3, 2), rank, groups=2, **more),
        [(18, 3), (6, 3), (8, 3)],
    ),
    "conv2d-channel": (
        lambda rank, **more: FactorizedConv2d(4, 6, (3, 2), rank, kind="channel", **more),
        [(6, 3), (3, 3), (24, 3)],
    ),
    "conv3d": (lambda rank, **more: FactorizedConv3d(4, 6, (2, 3, 1), rank, **more), [(12, 3), (3, 3), (12, 3)]),
    "embedding": (lambda rank, **more: FactorizedEmbedding(9, 6, rank, **more), [(9, 3), (3, 3), (6, 3)]),
}


@pytest.fixture(params=LAYERS)
def make(request: pytest.FixtureRequest) -> Make:
    return LAYERS[request.param][0]


@pytest.mark.parametrize("kind", LAYERS)
def test_the_long_side_of_every_factor_comes_first(kind: str) -> None:
    make, (U, inner, V) = LAYERS[kind]
    layer = make(3, depth=2)
    assert [tuple(factor.shape) for factor in layer.factors] == [U, inner, inner, V]
    assert (layer.rank, layer.format.depth) == (3, 2)


@pytest.mark.parametrize("rank", [0, -1, 2.5, True, "3", None])
def test_a_wrong_rank_is_refused(make: Make, rank: Any) -> None:
    with pytest.raises(ValueError, match=f"rank must be a whole number of at least 1, got {rank!r}"):
        make(rank)


@pytest.mark.parametrize("depth", [-1, 0.5, False, None])
def test_a_wrong_depth_is_refused(make: Make, depth: Any) -> None:
    with pytest.raises(ValueError, match=f"depth must be a whole number of at least 0, got {depth!r}"):
        make(3, depth=depth)


@pytest.mark.parametrize("wrong", [0, 2.5])
def test_from_a_dense_layer_too_the_rank_must_be_right(wrong: Any) -> None:
    for factorized, dense in [
        (FactorizedLinear, nn.Linear(6, 5)),
        (FactorizedConv2d, nn.Conv2d(4, 6, 3)),
        (FactorizedEmbedding, nn.Embedding(9, 6)),
    ]:
        with pytest.raises(ValueError, match=f"rank must be a whole number of at least 1, got {wrong}"):
            factorized.from_dense(dense, wrong)


@pytest.mark.parametrize("kind", ["temporal", "", None])
def test_a_wrong_kind_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match='kind must be one of "spatial", "channel", got'):
        FactorizedConv2d(4, 6, 3, 2, kind=kind)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": 3}, "in_channels must be divisible by groups"),
        ({"groups": 4}, "out_channels must be divisible by groups"),
        ({"groups": 0}, "groups must be a positive integer"),
        ({"padding": "wide"}, "Invalid padding string 'wide'"),
        ({"padding": "same", "stride": 2}, "padding='same' is not supported for strided convolutions"),
        ({"padding_mode": "mirror"}, "padding_mode must be one of"),
    ],
)
def test_torch_checks_what_a_convolution_is_given(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FactorizedConv2d(4, 6, 3, 2, **settings)


@pytest.mark.parametrize(
    ("make_ours", "make_torchs"),
    [
        (lambda: FactorizedLinear(40, 60, 40), lambda: nn.Linear(40, 60)),
        (lambda: FactorizedConv2d(20, 30, 3, 60, groups=2), lambda: nn.Conv2d(20, 30, 3, groups=2)),
        (lambda: FactorizedConv3d(8, 9, 3, 72), lambda: nn.Conv3d(8, 9, 3)),
        (lambda: FactorizedEmbedding(60, 40, 40), lambda: nn.Embedding(60, 40)),
    ],
    ids=["linear", "conv2d", "conv3d", "embedding"],
)
def test_a_fresh_layer_of_full_rank_is_distributed_as_torchs(
    make_ours: Callable[[], FactorizedLayer], make_torchs: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    ours, torchs = make_ours(), make_torchs()
    assert ours.weight.std().item() == pytest.approx(torchs.weight.std().item(), rel=0.05)
    assert ours.weight.abs().max().item() == pytest.approx(torchs.weight.abs().max().item(), rel=0.2)
    if ours.bias is not None:
        bound = 1 / math.sqrt(torchs.weight[0].numel())
        assert 0.5 * bound < ours.bias.abs().max() <= bound


def test_a_layer_without_bias_has_none(make: Make) -> None:
    if make is LAYERS["embedding"][0]:
        assert make(3).bias is None
    else:
        assert make(3).bias is not None
        assert make(3, bias=False).bias is None


def test_device_and_dtype_reach_every_parameter(make: Make) -> None:
    layer = make(3, depth=1, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    with torch.device("meta"):
        assert {parameter.device.type for parameter in make(3, depth=1).parameters()} == {"meta"}


def test_factors_left_unfilled_do_not_move_the_random_state() -> None:
    before = torch.get_rng_state()
    FactorizedLinear(6, 5, 3, init=None)
    FactorizedConv2d(4, 6, 3, 2, init=None)
    assert torch.equal(torch.get_rng_state(), before)
