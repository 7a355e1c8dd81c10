"""Public functions where users have set a default type or device, or are in inference mode: they do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.formats.scheme import Scheme

Context = Callable[[], AbstractContextManager[object]]
SCHEMES = [fz.LowRank(), fz.TensorTrain(), fz.Tucker(), fz.Monarch(), fz.Kronecker()]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Context] = {
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
}
every_context = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.Flatten(), nn.Linear(24 * 16, 8)
    return nn.Sequential(*layers)


@every_context
@every_scheme
@pytest.mark.parametrize("init", ["kaiming", nn.init.orthogonal_, "calibrated"])
def test_factors_are_the_same_and_can_be_trained(scheme: Scheme, init: object, context: Context) -> None:
    x = torch.randn(32, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    start = fz.Calibrated([x]) if init == "calibrated" else init
    made = []
    for surrounding in (torch.enable_grad, context):
        model, plan = convolutions(), fz.plan(convolutions(), scheme, ratio=0.6)
        with surrounding():
            made.append(fz.factorize(model, plan, init=start))
    expected, found = made
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    found(x).sum().backward()
    assert all(parameter.grad is not None for parameter in found.parameters())


@every_context
def test_energies_of_heads_are_the_same(context: Context) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)

    def planned() -> str:
        return str(fz.plan(model, energy=0.6, attention="heads"))

    expected = planned()
    with context():
        assert planned() == expected
