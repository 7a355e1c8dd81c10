"""A subject that is compressed in a moment: a small network that classifies points."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from factorized.experiments.compress.subject import Subject
from factorized.experiments.recipes.text import AnyRecipe
from factorized.experiments.training.progress import Reporter
from factorized.planning.plan import Plan
from tests.planning.models_for_planning import Mlp


def points(count: int = 300) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 20, generator=generator), torch.randint(5, (count,), generator=generator)


class Points(Subject):
    """Notes what is asked of it and, if it is ``watching``, how many networks that it gave are held at a time."""

    score, lower_is_better = "loss", True

    def __init__(self) -> None:
        super().__init__("points", ["some weights", "some points"], torch.device("cpu"), self._build)
        self.given: list[weakref.ref[nn.Module]] = []
        self.most_held, self.watching = 0, False
        self.done: list[str] = []  # what was asked of it
        self.stop_before_saving = ""  # a folder's name

    def _build(self) -> nn.Module:
        torch.manual_seed(0)
        return Mlp()

    def _watched(self, network: nn.Module) -> nn.Module:
        if self.watching:
            gc.collect()
            held = sum(one() is not None for one in self.given)
            self.given.append(weakref.ref(network))
            self.most_held = max(self.most_held, held + 1)
        return network

    def dense(self) -> nn.Module:
        self.done.append("dense")
        return self._watched(super().dense())

    def batches(self, samples: int) -> list[Any]:
        x, y = points()
        return list(zip(x[:samples].split(64), y[:samples].split(64), strict=True))

    @property
    def loss(self) -> Callable[..., Tensor]:
        return F.cross_entropy

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        self.done.append("evaluate")
        x, y = points()
        return {"loss": F.cross_entropy(network.eval()(x), y).item()}

    def save(self, network: nn.Module, folder: Path) -> None:
        if folder.name == self.stop_before_saving:
            raise KeyboardInterrupt
        self.done.append(f"save {folder.name}")
        if fz.forms(network):
            fz.save(network, folder)
        else:
            folder.mkdir(exist_ok=True)
            torch.save(network.state_dict(), folder / "plain.pt")

    def load(self, folder: Path) -> nn.Module:
        self.done.append("load")
        return self._watched(fz.load(folder, self._build()))

    def fit(self, recipe: AnyRecipe) -> AnyRecipe:
        return recipe

    def train(
        self, recipe: AnyRecipe, network: nn.Module, plan: Plan | None, folder: Path, reporter: Reporter
    ) -> dict[str, Any]:
        self.done.append("train")
        x, y = points()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        history = []
        for epoch in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            history.append({"epoch": epoch + 1, "loss": loss.item()})
        fz.save(network, folder)
        parameters = sum(p.numel() for p in network.parameters())
        return {"seconds": 1.0, "parameters": parameters, "recipe": recipe.to_dict(), "history": history}

    def trained(self, folder: Path) -> nn.Module:
        return self._watched(fz.load(folder, self._build()))
