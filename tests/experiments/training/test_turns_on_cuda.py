"""Several runs at once on a GPU, each a captured step on its own stream: they end as they do alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training import trainer as trainer_module
from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.train import train
from factorized.experiments.training.turns import Turn
from factorized.nn.timing import Step, capture
from tests.experiments.training import smooth
from tests.experiments.training.small import digits, state_of
from tests.experiments.training.test_loop_on_cuda import DEVICE, assert_near, exact
from tests.experiments.training.test_turns import Once
from tests.on_gpu import needs_cuda

pytestmark = [
    needs_cuda,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
SEEDS = (0, 1, 2)


@pytest.fixture(autouse=True)
def _short_turns_in_whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "STEPS", 2)  # of the four in an epoch
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def captured(*changes: str) -> Recipe:
    """A recipe whose steps are captured, and draw crops, flips and dropout."""
    return exact(f"model.name='{smooth.WITH_DROPOUT}'", "run.diagnose=true", *changes)


@pytest.mark.parametrize(
    "changes", [("run.compile=yes",), ("run.compile=no",), ("run.compile=no", "data.place=loader")]
)
def test_runs_at_once_end_where_they_do_alone(tmp_path: Path, changes: tuple[str, ...]) -> None:
    train(captured(*changes), digits(), tmp_path / "at_once", seeds=SEEDS, at_once=3, device=DEVICE)
    train(captured(*changes), digits(), tmp_path / "alone", seeds=SEEDS, device=DEVICE)
    for seed in SEEDS:
        assert_near(tmp_path / "at_once", tmp_path / "alone", seed)
    first, second = (state_of(tmp_path / "at_once", seed).network for seed in (0, 1))
    assert not any(torch.allclose(first[name], second[name]) for name in first if name.endswith(".U"))


def test_runs_that_were_stopped_at_once_go_on_with_the_same_draws(tmp_path: Path) -> None:
    changed = captured("run.compile=no")
    train(changed, digits(), tmp_path / "whole", seeds=SEEDS, device=DEVICE)
    cut = tmp_path / "cut"
    with pytest.raises(Interrupted):
        train(changed, digits(), cut, seeds=SEEDS, at_once=3, device=DEVICE, reporter=Once(epoch=1, step=1))
    states = [state_of(cut, seed) for seed in SEEDS]
    assert [(state.epoch, state.step) for state in states] == [(1, 3)] * 3
    assert not torch.equal(states[1].random["cuda"], states[2].random["cuda"])
    train(changed, digits(), cut, seeds=SEEDS, at_once=2, device=DEVICE, resume=True)
    for seed in SEEDS:
        assert_near(cut, tmp_path / "whole", seed)


class Products:
    """Draws random matrices and sums their products up, in a captured step."""

    def __init__(self) -> None:
        self.total = torch.zeros(64, 64, device=DEVICE)
        self.step: Step = capture(self._step)

    def _step(self) -> None:
        drawn = torch.rand(64, 8192, device=DEVICE)  # long sums: cuBLAS splits them, and adds them up in its workspace
        self.total += torch.nn.functional.dropout(drawn, 0.5) @ drawn.T

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.total.zero_()


def test_graphs_of_different_turns_share_neither_random_numbers_nor_workspaces() -> None:
    expected, alone = [], Products()
    for seed in SEEDS:
        alone.begin(seed)
        for _ in range(50):
            alone.step()
        expected.append(alone.total.clone())
    device = torch.device(DEVICE)
    turns, at_once = [Turn(device) for _ in SEEDS], []
    for seed, turn in zip(SEEDS, turns, strict=True):
        with turn:
            at_once.append(Products())
            at_once[-1].begin(seed)
    before = torch.cuda.get_rng_state()
    for _ in range(2):
        for turn, products in zip(turns, at_once, strict=True):
            with turn:
                for _ in range(25):
                    products.step()
    torch.cuda.synchronize()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for products, total in zip(at_once, expected, strict=True):
        torch.testing.assert_close(products.total, total, rtol=1e-4, atol=1e-3)
