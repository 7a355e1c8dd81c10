"""Masked language models: BERT's pre-training without next sentences; every batch draws which tokens are masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from factorized.experiments.text.positions import take_positions, taking_positions
from factorized.experiments.text.task import IGNORED, Batch, Example, RunningText, Windows, in_batches, totals
from factorized.experiments.training.source import draws_seed

REPLACED, KEPT = 0.8, 0.1  # of the tokens to predict: replaced by [MASK], left as they are; the rest become random


class MaskedTask(RunningText):
    """Predict 15 % of the tokens of a sequence from the others."""

    score = "loss"
    around = 2  # [CLS] and [SEP]
    _tokens, _seed = 0, 0  # of the training batches so far: nothing else decides what is drawn for the next one

    def prepare(self, model: nn.Module) -> None:
        """Let the model compute the logits of the tokens to predict only."""
        take_positions(model)

    def continue_after(self, tokens: int, seed: int) -> None:
        """Mask the next training batch as after so many tokens."""
        self._tokens, self._seed = tokens, seed

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Stack sequences and mask some of their tokens."""
        batch = self._masked(examples, torch.Generator().manual_seed(draws_seed(self._seed, self._tokens)))
        self._tokens += batch["input_ids"].numel()
        return batch

    def for_plain_model(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Return the masked sequences, and labels for all of their tokens."""
        inputs, labels = super().for_plain_model(batch)
        positions = inputs.pop("positions")
        return inputs, torch.full_like(inputs["input_ids"], IGNORED).scatter(1, positions, labels)

    def measure(self, model: nn.Module, part: str) -> dict[str, float]:
        """Return loss and accuracy on a part, masked in one fixed way."""
        (texts,) = self.corpus.texts[part]
        length = min(self.recipe.data.length - self.around, len(texts.tokens))
        draws = torch.Generator().manual_seed(0)
        some = in_batches(Windows(texts, length, length, part), self.recipe.run.batch)
        with taking_positions(model):
            found = totals(model, (self._masked(examples, draws) for examples in some))
        return {"loss": found.loss / found.labels, "accuracy": 100 * found.right / found.labels}

    def _masked(self, examples: Sequence[Example], draws: torch.Generator) -> Batch:
        tokens = torch.from_numpy(np.stack([example["input_ids"] for example in examples]))
        ends = tokens.new_full((len(tokens), 1), self.tokenizer.sep_token_id)
        starts = torch.full_like(ends, self.tokenizer.cls_token_id)
        tokens = torch.cat([starts, tokens, ends], dim=1)
        return mask_tokens(tokens, self.tokenizer, self.recipe.data.mask, draws)


def mask_tokens(
    tokens: Tensor,  # (batch, length), which begin with [CLS] and end with [SEP]
    tokenizer: Any,
    share: float,
    draws: torch.Generator | None = None,
) -> Batch:
    """Choose ``share`` of every sequence to be predicted: 80 % of these become [MASK], 10 % a random token, 10 % stay.

    As in BERT, all sequences have as many tokens to predict, so that ``positions`` and ``labels`` are matrices.
    """
    count = max(1, round(share * (tokens.shape[1] - 2)))
    scores = torch.rand(tokens[:, 1:-1].shape, generator=draws)
    positions = 1 + scores.topk(count, dim=1).indices.sort(dim=1).values  # (batch, count)
    labels = tokens.gather(1, positions)
    fate = torch.rand(labels.shape, generator=draws)
    drawn = torch.randint(len(tokenizer), labels.shape, generator=draws)
    shown = torch.where(fate < REPLACED, tokenizer.mask_token_id, labels)
    shown = torch.where(fate >= REPLACED + KEPT, drawn, shown)
    return {"input_ids": tokens.scatter(1, positions, shown), "positions": positions, "labels": labels}
