from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from factorized.experiments.training import train as train_module
from factorized.experiments.training import trainer as trainer_module
from factorized.experiments.training.network import build_network
from factorized.experiments.training.source import OnDevice
from factorized.experiments.training.train import train
from factorized.experiments.training.trainer import Trainer
from tests.experiments.training.small import assert_same_run, digits, recipe, state_of


@pytest.mark.parametrize("place", ["device", "loader"])
def test_several_seeds_in_one_call_end_as_they_do_one_by_one(tmp_path: Path, place: str) -> None:
    changed = recipe(f"data.place={place}", "decay.record_norms=true")
    together = train(changed, digits(), tmp_path / "together", seeds=(3, 0), device="cpu")
    assert [result["seed"] for result in together] == [3, 0]
    for seed in (3, 0):
        train(changed, digits(), tmp_path / "apart", seeds=(seed,), device="cpu")
        assert_same_run(tmp_path / "together", tmp_path / "apart", seed)
    weights = [state_of(tmp_path / "together", seed).network for seed in (3, 0)]
    assert not any(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] if name.endswith(".U"))


def test_seeds_share_one_network_one_step_and_one_copy_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, list[object]] = {"trainers": [], "sources": [], "run": []}

    class Watched(Trainer):
        def __init__(self, *arguments: object, **keywords: object) -> None:
            super().__init__(*arguments, **keywords)  # type: ignore[arg-type]
            made["trainers"].append(self)

        def run(self, *arguments: object) -> dict[str, object]:  # type: ignore[override]
            made["run"].append((self.network, self.step, self.source))
            return super().run(*arguments)  # type: ignore[arg-type]

    class Source(OnDevice):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made["sources"].append(self)

    monkeypatch.setattr(train_module, "Trainer", Watched)
    monkeypatch.setattr(trainer_module, "OnDevice", Source)
    train(recipe("schedule.epochs=1"), digits(), tmp_path, seeds=(0, 1, 2), device="cpu")
    assert len(made["trainers"]) == len(made["sources"]) == 1
    assert len(made["run"]) == 3
    assert len(set(made["run"])) == 1


def _counted(calls: list[str], real: Callable[..., object], *arguments: object) -> object:
    calls.append(real.__name__)
    return real(*arguments)


def test_the_network_of_a_seed_is_built_once_and_planned_once_for_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("build_dense", "plan_network", "factorize_network"):
        real = getattr(trainer_module, name)
        monkeypatch.setattr(trainer_module, name, partial(_counted, calls, real))
    train(recipe("schedule.epochs=1"), digits(), tmp_path, seeds=(0, 1), device="cpu")
    assert Counter(calls) == {"build_dense": 2, "plan_network": 1, "factorize_network": 2}


@pytest.mark.parametrize("change", ["factorize.energy=0.6", "factorize.allocate=spectrum"])
def test_seeds_whose_weights_ask_for_other_ranks_are_trained_all_the_same(tmp_path: Path, change: str) -> None:
    changed = recipe(change, "schedule.epochs=1")
    shapes = [
        {name: tensor.shape for name, tensor in build_network(changed, digits(), seed).state_dict().items()}
        for seed in (0, 1)
    ]
    assert shapes[0] != shapes[1]
    train(changed, digits(), tmp_path / "together", seeds=(0, 1), device="cpu")
    train(changed, digits(), tmp_path / "apart", seeds=(1,), device="cpu")
    assert_same_run(tmp_path / "together", tmp_path / "apart", seed=1)


@pytest.mark.parametrize("seeds", [(), (1, 1), (0, -1), (10**20,)])
def test_seeds_are_different_whole_numbers(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"seeds must be different whole numbers from 0 to 2\*\*63 - 1"):
        train(recipe(), digits(), tmp_path, seeds=seeds, device="cpu")
