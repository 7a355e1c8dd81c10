"""Warnings of the library stand at the line of the user's code that led to them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

import factorized as fz


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Linear(8, 4))


WIDE = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))


def attached() -> None:
    model = fz.factorize(small(), rank=2)
    fz.FrobeniusDecay(model, 1e-3).attach(torch.optim.Adam(model.parameters(), weight_decay=0))


CALLS: list[Callable[[], object]] = [
    lambda: fz.plan(WIDE, fz.TensorTrain(), rank=12),
    lambda: fz.factorize(deepcopy(WIDE), fz.TensorTrain(), rank=12),
    lambda: torch.no_grad()(fz.factorize)(deepcopy(WIDE), fz.TensorTrain(), rank=12),
    lambda: fz.factorize(small(), rank=2, init=fz.Calibrated([torch.randn(3, 8)])),
    attached,
]


@pytest.mark.parametrize("call", CALLS)
def test_a_warning_names_the_callers_line(call: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    lines, first = inspect.getsourcelines(call)
    assert found
    for warning in found:
        assert warning.filename == __file__, warning.message
        assert first <= warning.lineno < first + len(lines), warning.message
