"""Public functions where users have set a default type or device, or are in inference mode: they do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay.hook import AttachedDecay
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


def trained_once(scheme: Scheme) -> nn.Sequential:
    model = fz.factorize(convolutions(), scheme, ratio=0.6, min_size=0, keep_first_and_last=False)
    model(torch.ones(2, 4, 8, 8)).sum().backward()
    return model


def stepped(model: nn.Sequential, decay: AttachedDecay) -> list[Tensor]:
    decay.apply_()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


VALUES: dict[str, Callable[[nn.Sequential], object]] = {
    "frobenius": lambda model: fz.FrobeniusDecay(model, 0.1).penalty().detach(),
    "product": lambda model: fz.ProductPenalty(model, lambda W: W.abs().sum()).penalty().detach(),
    "nuclear": lambda model: fz.NuclearDecay(model, 0.1).penalty().detach(),
    "frobenius gradient": lambda model: stepped(model, fz.FrobeniusDecay(model, 0.1)),
    "product gradient": lambda model: stepped(model, fz.ProductPenalty(model, lambda W: W.abs().sum())),
    "nuclear gradient": lambda model: stepped(model, fz.NuclearDecay(model, 0.1)),
    "norms": lambda model: fz.NormMatcher(model).record(),
    "diagnose": lambda model: [[found.frobenius, found.nuclear] for found in fz.diagnose(model, lr=0.1)],
    "summary": lambda model: fz.summary(model).params,
    "bounds": lambda model: asdict(fz.margin_bounds(model, [(torch.ones(1, 4, 8, 8), torch.tensor([0]))], gamma=0.1)),
}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scheme", [fz.LowRank(), fz.Tucker()], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_figures_and_penalties_are_the_same_without_gradients(
    value: Callable[[nn.Sequential], object], scheme: Scheme, context: Context
) -> None:
    expected = value(trained_once(scheme))
    model = trained_once(scheme)
    with context():
        found = value(model)
    torch.testing.assert_close(found, expected)
    model(torch.ones(2, 4, 8, 8)).sum().backward()


@pytest.mark.parametrize("convert", [fz.compose, fz.lower, lambda model: fz.truncate(model, rank_scale=0.5)])
def test_what_is_made_in_inference_mode_can_be_trained(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = trained_once(fz.LowRank())
    with torch.inference_mode():
        made = convert(model)
    assert not any(parameter.is_inference() for parameter in made.parameters())
    made(torch.ones(2, 4, 8, 8)).sum().backward()
    torch.optim.SGD(made.parameters(), lr=0.1).step()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_heads_of_a_model_made_without_gradients_are_cut(context: Context) -> None:
    with context():
        model = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    assert fz.factorize_attention(model).self_attn.q_proj.out_features == 16
