"""The network to compress: with its data, its score, and a way to train it further."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from factorized.experiments.recipes.recipe import LINEAR_WARMUP, Factorize, Recipe, Schedule
from factorized.experiments.recipes.shorten import length_of, shorten
from factorized.experiments.recipes.text import AnyRecipe, TextRecipe, TextSchedule
from factorized.experiments.training.progress import Reporter
from factorized.nn.running import ExampleInput
from factorized.planning.plan import Plan

Plain = Literal["lowered", "composed"]
RECOVERY = 0.1  # of the training of a run: how long it is trained to recover, unless a recipe is given
RATE = 0.2  # of its learning rate, at its highest: docs/log.md has what others do


@dataclass(eq=False)
class Subject(ABC):
    """A trained network with its data. Abstract."""

    name: str  # what messages and the page call it
    identity: Sequence[str]  # checksums of its weights and data, which change when either does
    device: torch.device  # where it runs
    make: Callable[[], nn.Module]  # returns a fresh copy of the trained network
    recipe: AnyRecipe | None = None  # that it was trained with; None where nobody knows
    seed: int = 0  # of that training
    score: str = field(init=False)  # the figure that it is judged by
    lower_is_better: bool = field(init=False)

    def dense(self) -> nn.Module:
        """Return a fresh copy of the trained network, on the device."""
        return self.make().to(self.device).eval()

    @property
    def forms(self) -> tuple[Plain, ...]:
        """The plain forms that it can be written in."""
        return "lowered", "composed"

    @property
    def example_input(self) -> ExampleInput | None:
        """One input to count multiply-accumulates on; None for texts, whose length is free."""
        return None

    @abstractmethod
    def batches(self, samples: int) -> list[Any]:
        """Return ``samples`` training examples in batches, always the same ones."""

    @property
    @abstractmethod
    def loss(self) -> Callable[..., Tensor]:
        """The loss of outputs and the other parts of a batch."""

    @abstractmethod
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return the figures of a network on the test data, the score among them."""

    @abstractmethod
    def save(self, network: nn.Module, folder: Path) -> None:
        """Write a factorized or plain network to a folder, replacing what is there."""

    @abstractmethod
    def load(self, folder: Path) -> nn.Module:
        """Return the factorized network of such a folder, on the device."""

    @abstractmethod
    def fit(self, recipe: AnyRecipe) -> AnyRecipe:
        """Return the recipe with this model and its data; raise if it trains something else."""

    @abstractmethod
    def train(
        self, recipe: AnyRecipe, network: nn.Module, plan: Plan | None, folder: Path, reporter: Reporter
    ) -> dict[str, Any]:
        """Train a network further, in place, or resume that, into ``folder``; return the result of the run.

        The recipe is one that ``fit`` returned. A dense network has no plan.
        """

    @abstractmethod
    def trained(self, folder: Path) -> nn.Module:
        """Return the network that was trained into ``folder``, on the device."""


def recovery_recipe(own: AnyRecipe | None, given: AnyRecipe | None, factorize: Factorize) -> AnyRecipe:
    """Return the recipe that recovers a compressed network: the one given, or a tenth of its own training.

    A recipe of a dense network decays weights; here it decays the products that take their place, at the same strength.
    LAMB decays apart from the gradient, and so does FLAMBé, which takes its place: the strength means the same there.
    In a tenth of its own training the learning rate rises to a fifth of what it was and falls to zero, step by step.
    """
    recipe = given if given is not None or own is None else _short(own)
    if recipe is None:
        raise ValueError("a network that no recipe of ours trained needs a recipe to recover by")
    fields: dict[str, Any] = {"factorize": factorize, "paper": None, "name": f"{recipe.name}-recovery"}
    if recipe.factorize.scheme == "none" and recipe.decay.kind != "none":
        fields["decay"] = recipe.decay.model_copy(update={"kind": "frobenius"})
        if isinstance(recipe, TextRecipe) and (recipe.optimizer.name, recipe.decay.kind) == ("lamb", "weight"):
            fields["optimizer"] = recipe.optimizer.model_copy(update={"name": "flambe"})
    return recipe.model_copy(update=fields)


def _short(own: AnyRecipe) -> AnyRecipe:
    """Return a tenth of a recipe, with the learning rate of a training that starts from trained weights."""
    recipe = shorten(own, max(1, round(RECOVERY * length_of(own))))
    optimizer = recipe.optimizer.model_copy(update={"lr": RATE * recipe.optimizer.lr})
    if isinstance(recipe, Recipe):
        schedule: Any = Schedule(epochs=recipe.schedule.epochs, shape="linear")
    else:
        schedule = TextSchedule(updates=recipe.schedule.updates, warmup=LINEAR_WARMUP, shape="linear")
    return recipe.model_copy(update={"optimizer": optimizer, "schedule": schedule})
