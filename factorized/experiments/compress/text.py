"""Transformers of text to compress: runs of ours, and Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from factorized.experiments.compress.subject import Plain, Subject
from factorized.experiments.models.hugging_face import quiet, write_model
from factorized.experiments.recipes.text import AnyRecipe, TextRecipe
from factorized.experiments.text.corpus import Corpus
from factorized.experiments.text.models import auto_class
from factorized.experiments.text.task import TextTask, in_batches
from factorized.experiments.text.train import TASKS, train_text
from factorized.experiments.text.trained import load_text_run
from factorized.experiments.training.progress import Reporter
from factorized.files.pretrained import from_pretrained
from factorized.planning.plan import Plan

BATCH = 16


@dataclass(eq=False, kw_only=True)
class TextSubject(Subject):
    """A transformers model with the corpus of its task."""

    reads: TextRecipe  # of the run; for a model of others, one with its task and how its text is read
    corpus: Corpus  # the text, in the model's own tokens

    def __post_init__(self) -> None:
        self.task: TextTask = TASKS[self.reads.task](self.reads, self.corpus)
        self.score, self.lower_is_better = self.task.score, self.task.lower_is_better

    @property
    def forms(self) -> tuple[Plain, ...]:
        """Only ``"composed"``, because transformers opens dense layers only."""
        return ("composed",)

    def batches(self, samples: int) -> list[Any]:
        """Return training sequences, spread evenly over the text, with labels; masked tokens are always the same.

        Sequences of like length come together: padding would count as inputs of the layers.
        """
        examples: Any = self.task.examples
        count = min(samples, len(examples))
        some = sorted((examples[number * len(examples) // count] for number in range(count)), key=self.task.lengths)
        self.task.continue_after(0, seed=0)
        found = [self.task.collate(batch) for batch in in_batches(some, BATCH)]
        return [self.task.for_plain_model(batch) for batch in found] if self.task.predicts_tokens else found

    @property
    def loss(self) -> Callable[..., Tensor]:
        """The loss of the task, or the one that the model computes itself from the labels of a batch."""
        return self._loss if self.task.predicts_tokens else _own_loss

    def _loss(self, outputs: Any, labels: Tensor) -> Tensor:
        # a mean over the sequences, so that the tokens of short ones count as those of long ones
        return self.task.loss(outputs, labels, labels.new_tensor(len(labels)))

    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """Return the figures of the task on all text that was held out."""
        found = self.task.test(network.to(self.device))
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}

    def save(self, network: nn.Module, folder: Path) -> None:
        """Write a folder that transformers opens, by ``fz.from_pretrained`` if it is factorized; with the tokenizer."""
        write_model(network, folder)
        with quiet():
            self.corpus.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> nn.Module:
        """Return the network that ``save`` wrote."""
        with quiet():
            network = from_pretrained(auto_class(self.reads.task), folder)
        return network.to(self.device).eval()

    def fit(self, recipe: AnyRecipe) -> AnyRecipe:
        """Return the recipe with this model and this text."""
        model = self.reads.model.model_copy(update={"from_run": None})
        return self._of_task(recipe).model_copy(update={"data": self.reads.data, "model": model})

    def _of_task(self, recipe: AnyRecipe) -> TextRecipe:
        if not isinstance(recipe, TextRecipe) or recipe.task != self.reads.task:
            got = f"task {recipe.task!r}" if isinstance(recipe, TextRecipe) else "images"
            raise ValueError(
                f"--recover {recipe.name} is for {got}, and {self.name} is of task {self.reads.task!r}; give another "
                "recipe"
            )
        return recipe

    def train(
        self, recipe: AnyRecipe, network: nn.Module, plan: Plan | None, folder: Path, reporter: Reporter
    ) -> dict[str, Any]:
        """Train as the recipe says, on this text."""
        (result,) = train_text(
            self._of_task(recipe),
            self.corpus,
            folder,
            seeds=(self.seed,),
            device=self.device,
            resume="auto",
            reporter=reporter,
            start=network.cpu().float(),  # in half precision, small updates would be rounded away
        )
        return result

    def trained(self, folder: Path) -> nn.Module:
        """Return the network of the run."""
        _, _, network, _ = load_text_run(folder / f"seed-{self.seed}")
        return network.to(self.device)


def _own_loss(outputs: Any) -> Tensor:
    found: Tensor = outputs.loss
    return found
