from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorized import FactorizedConv2d, FactorizedEmbedding, FactorizedLinear, drop_connect
from factorized.nn.autotune import autotune
from factorized.nn.layer import FactorizedLayer
from factorized.testing import error

CONV = FactorizedConv2d(4, 4, 3, 2).executions
LINEAR = FactorizedLinear(4, 3, 2).executions


class Net(nn.Module):
    """Two equal convolutions, one that differs, a linear layer called by keyword, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = FactorizedConv2d(4, 4, 3, 2, padding=1)
        self.second = FactorizedConv2d(4, 4, 3, 2, padding=1)
        self.strided = FactorizedConv2d(4, 4, 3, 2, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.head = FactorizedLinear(4, 3, 2)
        self.idle = FactorizedLinear(4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.strided(self.second(self.first(x))))
        return self.head(input=x.mean(dim=(2, 3)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 4, 6, 6)


def pretend(monkeypatch: pytest.MonkeyPatch, fastest: dict[int, str]) -> list[tuple[str, ...]]:
    """Let the named execution win of layers with so many executions; return what will have been measured."""
    measured: list[tuple[str, ...]] = []

    def milliseconds(steps: dict[str, Any], **_: Any) -> dict[str, float]:
        measured.append(tuple(steps))
        for step in steps.values():
            step()
        return {name: 1.0 if name == fastest[len(steps)] else 2.0 for name in steps}

    monkeypatch.setattr(sys.modules["factorized.nn.autotune"], "median_milliseconds", milliseconds)
    return measured


@pytest.mark.parametrize("conv", CONV)
@pytest.mark.parametrize("linear", LINEAR)
def test_every_layer_gets_its_fastest_execution(
    conv: str, linear: str, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {len(CONV): conv, len(LINEAR): linear})
    model = Net()
    times = autotune(model, x)
    assert {name: set(measured) for name, measured in times.items()} == {
        "first": set(CONV),
        "second": set(CONV),
        "strided": set(CONV),
        "head": set(LINEAR),
    }
    assert [model.first.execution, model.second.execution, model.strided.execution] == [conv] * 3
    assert model.head.execution == linear
    assert model.idle.execution == "auto"


def test_the_random_state_stays_as_it_is(x: Tensor) -> None:
    model = Net()
    before = torch.get_rng_state()
    autotune(model, x, rounds=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_it_measures_decides(x: Tensor) -> None:
    model = Net()
    for name, times in autotune(model, x, rounds=1).items():
        assert all(milliseconds > 0 for milliseconds in times.values())
        assert model.get_submodule(name).execution == min(times, key=times.__getitem__)


def test_under_drop_connect_executions_are_timed_as_evaluation_runs_them(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def step(layer: FactorizedLayer, *_: Any) -> Any:
        timed.append(layer.chosen_execution())
        return lambda: None

    pretend(monkeypatch, {len(CONV): "chain"})
    monkeypatch.setattr(sys.modules["factorized.nn.autotune"], "training_step", step)
    model = drop_connect(nn.Sequential(FactorizedConv2d(4, 4, 3, 2)), 0.5).train()
    autotune(model, x)
    assert timed == list(CONV)
    assert (model[0].execution, model[0].drop_connect) == ("chain", 0.5)


def test_equal_layers_are_measured_once(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend(monkeypatch, {len(CONV): "composed", len(LINEAR): "composed"})
    autotune(Net(), x)
    assert measured == [CONV, CONV, LINEAR]


@pytest.mark.parametrize("change", ["frozen", "rank", "depth", "bias", "dilation"])
def test_layers_that_differ_are_measured_apart(change: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend(monkeypatch, {len(CONV): "composed"})
    settings: dict[str, Any] = {"format": 2, "depth": 0, "bias": True, "padding": 1}
    other = {
        **settings,
        **{"rank": {"format": 3}, "depth": {"depth": 1}, "bias": {"bias": False}}.get(change, {}),
        **({"dilation": 2, "padding": 2} if change == "dilation" else {}),
    }
    model = nn.Sequential(FactorizedConv2d(4, 4, 3, **settings), FactorizedConv2d(4, 4, 3, **other))
    model[1].requires_grad_(change != "frozen")
    autotune(model, x)
    assert measured == [CONV, CONV]


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("between", [nn.MaxPool2d(2), ChannelsLast()])
def test_equal_layers_that_see_different_inputs_are_measured_apart(
    between: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = pretend(monkeypatch, {len(CONV): "composed"})
    same = [FactorizedConv2d(4, 4, 3, 2, padding=1, execution="composed") for _ in range(2)]
    autotune(nn.Sequential(same[0], between, same[1]), x)
    assert measured == [CONV, CONV]


def test_the_model_computes_what_it_did(x: Tensor) -> None:
    model = Net().double().eval()
    before = model(x.double())
    autotune(model, x.double(), rounds=1)
    assert error(model(x.double()), before) < 1e-12


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_no_trace_but_the_executions(training: bool, x: Tensor) -> None:
    model = Net().train(training)
    model.norm.eval()
    model.head.register_forward_pre_hook(lambda *_: None)  # to be kept
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = {name: len(part._forward_pre_hooks) for name, part in model.named_modules()}
    modes = {name: part.training for name, part in model.named_modules()}
    autotune(model, x, rounds=1)
    assert {name: len(part._forward_pre_hooks) for name, part in model.named_modules()} == hooks
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("example", [torch.zeros(2, 5, 6, 6), torch.zeros(3), {"y": torch.zeros(1)}, (1, 2)])
def test_an_example_that_does_not_run_is_refused_and_changes_nothing(example: Any) -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"example_input does not run through Net: .* Give what its forward takes"):
        autotune(model, example)
    assert model.training
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert {layer.execution for layer in (model.first, model.head)} == {"auto"}


@pytest.mark.parametrize("rounds", [0, 1.5])
def test_a_wrong_number_of_rounds_is_refused(rounds: Any, x: Tensor) -> None:
    with pytest.raises(ValueError, match=f"rounds must be a whole number of at least 1, got {rounds}"):
        autotune(Net(), x, rounds=rounds)


@pytest.mark.parametrize("model", [nn.Linear(4, 3), nn.Sequential(FactorizedEmbedding(9, 6, 3))])
def test_a_model_with_nothing_to_tune_is_refused(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no factorized linear .* call fz.factorize first"):
        autotune(model, x)


def test_nothing_is_timed_on_the_meta_device(x: Tensor) -> None:
    model = Net().to("meta")
    with pytest.raises(ValueError, match=r"^first is on the meta device, where nothing is computed"):
        autotune(model, x)
    assert model.first.execution == "auto"


def test_a_single_layer_is_a_model(x: Tensor) -> None:
    layer = FactorizedConv2d(4, 4, 3, 2)
    (name,) = autotune(layer, x, rounds=1)
    assert name == ""
    assert layer.execution in CONV


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trains", [True, False])
def test_without_gradients_layers_are_timed_forward(context: Any, trains: bool, x: Tensor) -> None:
    model = Net().requires_grad_(trains)
    with context():
        autotune(model, x, rounds=1)
    assert model.first.execution in CONV


def test_frozen_layers_are_timed_too(x: Tensor) -> None:
    model = Net()
    model.first.requires_grad_(False)
    autotune(model, x, rounds=1)
    assert model.first.execution in CONV


@pytest.mark.nightly
def test_layers_can_be_timed_compiled(x: Tensor) -> None:
    layer = FactorizedLinear(4, 3, 2)
    (times,) = autotune(layer, torch.randn(2, 4), rounds=1, compiled=True).values()
    assert layer.execution == min(times, key=times.__getitem__)
