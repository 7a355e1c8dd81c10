from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.experiments.models.build import build_model
from factorized.experiments.training.state import FILE
from factorized.experiments.training.step import TrainingStep
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import save_trained
from tests.experiments.training.small import STEPS, Signals, digits, recipe, state_of


def break_at(monkeypatch: pytest.MonkeyPatch, step: int, what: str) -> None:
    """Put NaN into the loss, or NaN or infinity into one weight, after a step of the run."""
    original, taken = TrainingStep.__call__, []

    def broken(self: TrainingStep) -> None:
        original(self)
        taken.append(None)
        if len(taken) == step:
            target = self.loss_sum if what == "loss" else list(self.network.parameters())[-1].detach()[3]
            target.fill_(float("inf" if what == "infinite weight" else "nan"))

    monkeypatch.setattr(TrainingStep, "__call__", broken)


def test_a_learning_rate_far_too_high_stops_with_the_epoch_the_rate_and_what_to_try(tmp_path: Path) -> None:
    changed = recipe("optimizer.lr=3e30", "schedule.milestones=[1]", "schedule.factor=0.5")
    with pytest.raises(
        ValueError,
        match=r"loss is nan and weights are not finite in epoch 1, at learning rate 3e\+30; .*"
        r"Try optimizer\.lr=0\.1 or schedule\.warmup_epochs=1 or optimizer\.clip=1$",
    ):
        train(changed, digits(), tmp_path, device="cpu")
    assert not (tmp_path / "seed-0" / FILE).exists()


@pytest.mark.parametrize("warmup", ["schedule.warmup_epochs=1", "schedule.shape=linear"])
def test_what_the_recipe_does_already_is_not_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: str
) -> None:
    break_at(monkeypatch, 1, "loss")
    changed = recipe("optimizer.lr=0.03", "optimizer.clip=0.5", warmup)
    with pytest.raises(ValueError, match=r"Try optimizer\.lr=0\.01$"):
        train(changed, digits(), tmp_path, device="cpu")


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("scheme", ["none", "low_rank"])
def test_weights_that_are_not_finite_from_the_start_are_blamed_on_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, scheme: str
) -> None:
    def broken(*arguments: object) -> nn.Module:
        network = build_model(*arguments)
        network.get_submodule("linear").weight.data[1, 2] = float(value)
        return network

    monkeypatch.setattr("factorized.experiments.models.build.build_model", broken)
    changed = recipe() if scheme == "low_rank" else recipe(name="digits/resnet8")
    with pytest.raises(ValueError, match=r"model 'resnet8': linear\.weight holds NaN or infinity before training"):
        train(changed, digits(), tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["loss", "weight", "infinite weight"])
@pytest.mark.parametrize("step", [STEPS + 1, 2 * STEPS])
def test_what_is_not_finite_stops_the_run_and_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, step: int
) -> None:
    break_at(monkeypatch, step, what)
    with pytest.raises(ValueError, match=r"in epoch 2, at learning rate 0\.01; the checkpoint before it"):
        train(recipe(), digits(), tmp_path, device="cpu")
    state = state_of(tmp_path)
    assert (state.epoch, state.step) == (1, 0)
    assert all(torch.isfinite(tensor).all() for tensor in state.network.values())


def test_a_signal_does_not_replace_a_good_checkpoint_by_one_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at(monkeypatch, STEPS + 1, "weight")
    with pytest.raises(ValueError, match="in epoch 2"):
        train(recipe(), digits(), tmp_path, device="cpu", reporter=Signals(signal.SIGTERM, epoch=1, step=0))
    assert (state_of(tmp_path).epoch, state_of(tmp_path).step) == (1, 0)


@pytest.mark.parametrize("factorized", [False, True])
def test_a_network_that_is_not_finite_is_not_written(tmp_path: Path, factorized: bool) -> None:
    network = build_model("resnet8", 10, 8, 1)
    if factorized:
        fz.factorize(network, ratio=0.5)
    network.get_submodule("linear").weight.data[1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"^linear: weight holds NaN; "):
        save_trained(network, tmp_path)
    assert list(tmp_path.iterdir()) == []
