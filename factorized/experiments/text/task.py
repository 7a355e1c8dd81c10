"""The interface of tasks: examples, batches, the loss and scores; and helpers that tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler

from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.corpus import Corpus
from factorized.experiments.text.tokens import PackedTexts
from factorized.experiments.training.result import LOWER_IS_BETTER
from factorized.nn.running import evaluation_mode

Batch = dict[str, Tensor]
Example = dict[str, Any]
IGNORED = -100  # the label of a token that is not to be predicted, as torch has it


class TextTask(ABC):
    """A task on a corpus."""

    score: ClassVar[str]  # the figure a run is judged by
    predicts_tokens: ClassVar[bool] = True  # else the model computes its own loss, a mean over examples

    def __init__(self, recipe: TextRecipe, corpus: Corpus) -> None:
        self.recipe, self.corpus, self.tokenizer = recipe, corpus, corpus.tokenizer

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower score is a better one."""
        return self.score in LOWER_IS_BETTER

    @property
    @abstractmethod
    def examples(self) -> Dataset[Example]:
        """The training examples."""

    def prepare(self, model: nn.Module) -> None:  # noqa: B027
        """Change how the model is called, where the task's batches need it; raise if it does not take them."""

    def continue_after(self, tokens: int, seed: int) -> None:  # noqa: B027
        """Draw what is random in the next training batch as after so many tokens of them."""

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> Batch:
        """Return training examples as one batch."""

    def lengths(self, example: Example) -> list[int]:
        """Return the lengths of an example that a batch is padded in, to its longest example."""
        return [len(example["input_ids"])]

    def for_plain_model(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Return what a model that was not prepared takes, and the labels of its logits."""
        inputs = dict(batch)
        labels = inputs.pop("labels")
        return inputs, labels

    def batches(self, seed: int, parts: int) -> Sampler[list[int]] | None:
        """Return which examples make up each of the ``parts`` of a batch; None for equal shares of ``run.batch``."""
        return None

    def loss(
        self,
        outputs: Any,
        labels: Tensor,  # (examples, length)
        num_items_in_batch: Tensor,  # ()
    ) -> Tensor:  # ()
        """Return the loss of a part of a batch: a sum, divided by the labels of the whole batch.

        The sum of this over all parts and processes is the mean over the batch, however it is divided.
        """
        smoothing = self.recipe.run.label_smoothing
        return sum_of_losses(outputs["logits"], labels, smoothing) / num_items_in_batch

    def is_captured(self, device: torch.device, processes: int) -> bool:
        """Return whether the forward and backward pass of a batch are one CUDA graph.

        Batches have to be undivided: a part of a batch would overwrite the gradients of the last one.
        """
        run = self.recipe.run
        may = run.graph == "auto" and device.type == "cuda" and processes == 1 and run.accumulate == 1
        return may and self.can_be_captured

    @property
    def can_be_captured(self) -> bool:
        """Whether batches have few shapes and the pass reads no values, so that the GPU never waits for Python."""
        return False

    def to_capture(self, batch: Batch) -> Batch:
        """Return a training batch with the same loss and gradients, in one of few shapes."""
        return batch

    @abstractmethod
    def measure(self, model: nn.Module, part: str) -> dict[str, float]:
        """Return the figures of one part of the corpus."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return figures on the validation text, quickly enough for use during training."""
        return self.measure(model, "validation")

    def test(self, model: nn.Module) -> dict[str, Any]:
        """Return the figures of a trained model on the validation text, and on every test text by name."""
        found: dict[str, Any] = self.measure(model, "validation")
        for part in self.corpus.tests:
            found |= {f"{name}_{part}": value for name, value in self.measure(model, part).items()}
        return found


class RunningText(TextTask):
    """A task on running text, which is cut into sequences of one length. Abstract."""

    around: ClassVar[int] = 0  # tokens that are put around each of them

    @property
    def can_be_captured(self) -> bool:
        """Whether it is compiled: all batches have the same shape."""
        return self.recipe.run.compile

    @cached_property
    def examples(self) -> Windows:
        """Training text, cut into sequences one after the other."""
        (train,) = self.corpus.texts["train"]
        length = self.recipe.data.length - self.around
        return Windows(train, length, length, "training")


class Windows(Dataset[Example]):
    """Sequences of ``length`` tokens of a text, ``step`` tokens apart."""

    def __init__(self, texts: PackedTexts, length: int, step: int, what: str) -> None:
        self.tokens, self.length, self.step = texts.tokens, length, step
        self.count = (len(self.tokens) - length) // step + 1
        if self.count < 1:
            raise ValueError(
                f"the {what} text has {len(self.tokens):,} tokens, fewer than one sequence of data.length = {length}; "
                "give more text, or a smaller data.length"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Example:
        start = number * self.step
        return {"input_ids": self.tokens[start : start + self.length].astype(np.int64)}


def sum_of_losses(
    logits: Tensor,  # (batch, length, vocabulary)
    labels: Tensor,  # (batch, length)
    smoothing: float = 0.0,
) -> Tensor:  # ()
    """Return the summed cross-entropy of the labels, in float32; ``smoothing`` is spread over the vocabulary."""
    rows, wanted = logits.flatten(0, 1).float(), labels.flatten()
    return F.cross_entropy(rows, wanted, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)


@dataclass(frozen=True)
class Totals:
    """Sums over the labels of some batches."""

    loss: float
    labels: int
    right: int  # labels whose logit is the largest


@torch.no_grad()
def totals(model: nn.Module, batches: Iterable[Batch]) -> Totals:
    """Return the sums that a model in evaluation mode has on batches with ``labels``."""
    device = device_of(model)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    count, right = torch.zeros((2,), dtype=torch.int64, device=device).unbind()
    with evaluation_mode(model):
        for batch in batches:
            inputs = {name: tensor.to(device) for name, tensor in batch.items()}
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            loss += sum_of_losses(logits, labels)
            count += labels.ne(IGNORED).sum()
            right += (logits.argmax(-1) == labels).sum()
    return Totals(loss.item(), int(count), int(right))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    return next(model.parameters()).device


def padded(
    sequences: Sequence[Any],
    pad: int,
) -> Tensor:  # (sequences, longest)
    """Return sequences of numbers as rows, filled with ``pad``."""
    rows = np.full((len(sequences), max(len(sequence) for sequence in sequences)), pad, dtype=np.int64)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(rows)


def in_batches(data: Sequence[Any] | Dataset[Any], size: int) -> Iterator[list[Any]]:
    """Yield the items of ``data`` in order, a batch at a time."""
    count = len(data)  # type: ignore[arg-type]
    for start in range(0, count, size):
        yield [data[number] for number in range(start, min(start + size, count))]
