"""Image classifiers to compress: runs of ours, and networks that a function or a Hugging Face folder gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.experiments.compress.subject import Plain, Subject
from factorized.experiments.data.augment import normalize
from factorized.experiments.data.images import Images
from factorized.experiments.models.build import build_for
from factorized.experiments.models.hugging_face import ImageClassifier, read_classifier, write_classifier
from factorized.experiments.recipes.recipe import Model, Recipe
from factorized.experiments.recipes.text import AnyRecipe
from factorized.experiments.training.evaluate import Evaluator
from factorized.experiments.training.export import describe_network
from factorized.experiments.training.network import Start
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import load_trained
from factorized.files.checkpoint import load, save
from factorized.files.checksum import save_tensors
from factorized.nn.running import ExampleInput
from factorized.planning.plan import Plan
from factorized.surgery.compose import is_factorized
from factorized.surgery.state import plain_state

BATCH, PIXELS = 128, 2**19  # most images of a batch, and about their pixels: all activations of a batch are held
PLAIN = "model.safetensors"


@dataclass(eq=False, kw_only=True)
class ImageSubject(Subject):
    """A network that maps images to logits of their classes."""

    model: str  # its name as recipes have it: one of ours, ``module:function`` or ``hf:FOLDER``
    images: Images  # what it was trained on, normalized as it was then
    score, lower_is_better = "accuracy", False

    @property
    def forms(self) -> tuple[Plain, ...]:
        """Both forms; for a model of transformers only ``"composed"``, because transformers opens dense layers only."""
        return ("composed",) if self._is_of_transformers else super().forms

    @property
    def _is_of_transformers(self) -> bool:
        return self.model.startswith("hf:")

    @property
    def example_input(self) -> ExampleInput | None:
        """One black image."""
        return torch.zeros(1, self.images.channels, *self.images.size)

    def batches(self, samples: int) -> list[Any]:
        """Return training images in a fixed shuffle, normalized, with their labels."""
        images = self.images
        size = min(BATCH, max(1, PIXELS // prod(images.size)))
        rows = torch.randperm(len(images.y_train), generator=torch.Generator().manual_seed(0))[:samples]
        return [
            (normalize(images.x_train[some], images.mean, images.std), images.y_train[some])
            for some in rows.split(size)
        ]

    @property
    def loss(self) -> Callable[..., Tensor]:
        """The cross-entropy of the labels."""
        return F.cross_entropy

    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return the accuracy in percent, and the loss, on the test images."""
        loss, accuracy = Evaluator(network.to(self.device), self.images, torch.float32, graph=False)()
        return {"accuracy": accuracy, "loss": loss}

    def save(self, network: nn.Module, folder: Path) -> None:
        """Write the files of ``fz.save``, or one safetensors file of a plain network; of transformers, its folder."""
        if isinstance(network, ImageClassifier):
            write_classifier(network, folder, Path(self.model.removeprefix("hf:")).expanduser())
            return
        if is_factorized(network):
            save(network, folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        about = describe_network(
            Recipe.model_validate({"model": {"name": self.model}, "name": "compressed"}), self.images
        )
        save_tensors(folder / PLAIN, plain_state(network), about)

    def load(self, folder: Path) -> nn.Module:
        """Return the network that ``save`` wrote."""
        made = read_classifier(folder) if self._is_of_transformers else load(folder, build_for(self.model, self.images))
        return made.to(self.device).eval()

    def fit(self, recipe: AnyRecipe) -> AnyRecipe:
        """Return the recipe with this model and these images."""
        own = _of_images(recipe, self.name)
        data = self.recipe.data.name if isinstance(self.recipe, Recipe) else self.images.name
        fields = {"model": Model(name=self.model), "data": own.data.model_copy(update={"name": data})}
        return own.model_copy(update=fields)

    def train(
        self, recipe: AnyRecipe, network: nn.Module, plan: Plan | None, folder: Path, reporter: Reporter
    ) -> dict[str, Any]:
        """Train as the recipe says."""
        (result,) = train(
            _of_images(recipe, self.name),
            self.images,
            folder,
            seeds=(self.seed,),
            device=self.device,
            resume="auto",
            reporter=reporter,
            start=Start(network, plan),
        )
        return result

    def trained(self, folder: Path) -> nn.Module:
        """Return the network of the run."""
        _, _, network = load_trained(folder / f"seed-{self.seed}", trust_model=True)
        return network.to(self.device)


def _of_images(recipe: AnyRecipe, name: str) -> Recipe:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"--recover {recipe.name} trains on text, and {name} classifies images; give another recipe")
    return recipe
