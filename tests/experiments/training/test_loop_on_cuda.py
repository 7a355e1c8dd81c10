"""What only a GPU can show: a compiled and captured step that trains as plain eager does, for seed after seed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.train import train
from factorized.experiments.training.trainer import Trainer
from tests.experiments.training import smooth
from tests.experiments.training.small import NAME, STEPS, Signals, digits, recipe, state_of
from tests.on_gpu import needs_cuda

pytestmark = [
    needs_cuda,
    # torch's compiler makes an instance of an autograd function, and warns about it
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # and advises what these tests must not do: they compare in whole float32
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
DEVICE = "cuda"
EAGER = ("run.compile=no", "run.graph=no")


@pytest.fixture(autouse=True)
def _whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def exact(*changes: str, name: str = NAME) -> Recipe:
    """A recipe in float32 with crops, flips and a step of the schedule, of a network without kinks."""
    network = f"model.name='{smooth.NAME}'"
    return recipe(network, "run.precision=float32", "data.crop_padding=2", "data.flip=true", *changes, name=name)


def assert_near(actual: Path, expected: Path, seed: int = 0) -> None:
    left, right = state_of(actual, seed), state_of(expected, seed)
    assert left.epoch == right.epoch == 2
    for name, tensor in right.network.items():
        torch.testing.assert_close(left.network[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for row, other in zip(left.history, right.history, strict=True):
        for name in ("loss", "test_loss", "frobenius", "nuclear"):
            assert row[name] == pytest.approx(other[name], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "change"),
    [(NAME, "run.diagnose=true"), (NAME, "optimizer.clip=0.5"), ("digits/resnet8-wide-fd", "run.diagnose=true")],
)
def test_a_captured_and_compiled_run_ends_where_an_eager_one_does(tmp_path: Path, name: str, change: str) -> None:
    train(exact(change, name=name), digits(), tmp_path / "fast", device=DEVICE)
    train(exact(change, *EAGER, name=name), digits(), tmp_path / "eager", device=DEVICE)
    assert_near(tmp_path / "fast", tmp_path / "eager")


def test_eager_on_the_gpu_ends_where_the_cpu_does(tmp_path: Path) -> None:
    still = exact("data.crop_padding=0", "data.flip=false", *EAGER)  # the devices draw different numbers
    train(still, digits(), tmp_path / "gpu", device=DEVICE)
    train(still, digits(), tmp_path / "cpu", device="cpu")
    assert_near(tmp_path / "gpu", tmp_path / "cpu")


def test_seeds_that_share_a_captured_step_end_as_they_do_with_one_of_their_own(tmp_path: Path) -> None:
    train(exact(), digits(), tmp_path / "together", seeds=(0, 1), device=DEVICE)
    for seed in (1, 0):
        train(exact(), digits(), tmp_path / "apart", seeds=(seed,), device=DEVICE)
        assert_near(tmp_path / "together", tmp_path / "apart", seed)
    first, second = (state_of(tmp_path / "together", seed).network for seed in (0, 1))
    assert not any(torch.allclose(first[name], second[name]) for name in first if name.endswith(".U"))


@pytest.mark.parametrize("step", [0, STEPS - 2])
def test_a_captured_run_goes_on_in_the_middle_of_an_epoch_with_the_same_draws(tmp_path: Path, step: int) -> None:
    train(exact(), digits(), tmp_path / "whole", device=DEVICE)
    reporter = Signals(signal.SIGTERM, epoch=1, step=step)
    with pytest.raises(Interrupted):
        train(exact(), digits(), tmp_path / "cut", device=DEVICE, reporter=reporter)
    assert (state_of(tmp_path / "cut").epoch, state_of(tmp_path / "cut").step) == (1, step + 2)
    train(exact(), digits(), tmp_path / "cut", device=DEVICE, resume=True)
    assert_near(tmp_path / "cut", tmp_path / "whole")


def test_a_streamed_run_ends_where_one_with_its_data_on_the_gpu_does(tmp_path: Path) -> None:
    train(exact("data.place=loader"), digits(), tmp_path / "streamed", device=DEVICE)
    train(exact(), digits(), tmp_path / "device", device=DEVICE)
    assert_near(tmp_path / "streamed", tmp_path / "device")


def test_a_run_shorter_than_the_warm_up_of_a_capture_is_captured_all_the_same(tmp_path: Path) -> None:
    short = recipe("run.batch=512", "schedule.epochs=1", "decay.record_norms=true")
    [result] = train(short, digits(), tmp_path, device=DEVICE)
    assert result["history"][0]["loss"] < 5


def test_the_gpu_computes_in_bfloat16_with_float32_weights_in_channels_last() -> None:
    trainer = Trainer(recipe("run.graph=no"), digits(), Processes(torch.device(DEVICE)), seed=0)
    seen = []
    trainer.network.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    trainer.step._loss = trainer.step._loss_and_correct
    trainer.source.start(0, 0)
    trainer.step()
    assert seen[0].dtype == torch.bfloat16
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert {parameter.dtype for parameter in trainer.network.parameters()} == {torch.float32}


def test_digits_are_learned_with_every_default_of_the_gpu(tmp_path: Path) -> None:
    [result] = train(recipe("schedule.epochs=10", "run.batch=64"), digits(), tmp_path, device=DEVICE)
    assert result["accuracy"] > 85
    assert "NVIDIA" in result["machine"]["device"] or torch.version.hip
