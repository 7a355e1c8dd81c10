"""``benchmarks.shortcuts``: the network of the authors' code, trained by the recipe of ours."""

from __future__ import annotations

import torch

from factorized.experiments.data.stand_in import stand_in
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.trainer import Trainer


def test_the_norms_of_shortcuts_are_all_that_goes() -> None:
    """The recipe factorizes what it factorizes with norms, and a step trains the shortcuts."""
    images, trainers = stand_in("noise", 10, 32, 3, 4), []
    for change in ([], ["model.name=benchmarks.shortcuts:bare_resnet32x2"]):
        recipe = load_recipe("cifar10/resnet32x2-lowrank-0.1-si", ["run.batch=2", *change])
        trainers.append(Trainer(recipe, images, Processes(torch.device("cpu")), 0))
    ours, theirs = ({name for name, _ in trainer.network.named_modules()} for trainer in trainers)
    assert ours - theirs == {f"stages.{stage}.0.shortcut.{part}" for stage in (1, 2) for part in (0, 1)}
    shortcuts = [trainers[1].network.get_submodule(f"stages.{stage}.0.shortcut") for stage in (1, 2)]
    before = [shortcut.weight.detach().clone() for shortcut in shortcuts]
    trainers[1].source.start(0, 0)
    trainers[1].step()
    for shortcut, weight in zip(shortcuts, before, strict=True):
        assert type(shortcut).__name__ == "FactorizedConv2d"
        assert not shortcut.weight.equal(weight)
