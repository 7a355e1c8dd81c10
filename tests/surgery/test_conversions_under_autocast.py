"""What is computed once and kept is not rounded by an autocast around the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import factorized as fz


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 5)
    )


def attention() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))


def factorized() -> nn.Sequential:
    return fz.factorize(dense(), ratio=0.6, min_size=0)


def with_fewer_heads() -> nn.Sequential:
    return fz.factorize(attention(), ratio=0.6, attention="heads", keep_first_and_last=False)


def beside_residuals() -> nn.Sequential:
    return fz.factorize(dense(), fz.Residual(fz.LowRank()), rank=3, min_size=0)


def loaded() -> nn.Sequential:
    model = beside_residuals()
    fz.load_dense(model, {name: 2 * value for name, value in dense().state_dict().items()})
    return model


@pytest.mark.parametrize(
    "make",
    [
        beside_residuals,
        with_fewer_heads,
        loaded,
        lambda: factorized()[4].to_dense(),
        lambda: fz.compose(factorized()),
        lambda: fz.compose(with_fewer_heads()),
        lambda: fz.lower(fz.factorize(dense(), fz.Overcomplete("deep"))),
        lambda: fz.truncate(factorized(), rank_scale=0.5),
    ],
    ids=["residual", "heads", "load_dense", "to_dense", "compose", "heads back", "lower", "truncate"],
)
def test_weights_are_those_without_autocast(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    expected = make().state_dict()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        found = make().state_dict()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_calibrated_residual_is_the_dense_weight_though_the_model_ran_under_autocast() -> None:
    given = dense()
    batches = fz.Calibrated([torch.randn(192, 3, 5, 5)])
    with torch.autocast("cpu", torch.bfloat16):
        model = fz.factorize(dense(), fz.Residual(fz.LowRank()), rank=3, min_size=0, init=batches)
    for found, expected in zip(fz.compose(model), given, strict=True):
        if isinstance(expected, (nn.Conv2d, nn.Linear)):
            torch.testing.assert_close(found.weight, expected.weight, rtol=1e-5, atol=1e-6)
