"""Masked language models: BERT's pre-training without next sentences; tokens are masked anew in every batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from factorized.experiments.text.task import (
    IGNORED,
    Batch,
    Example,
    RunningText,
    Windows,
    device_of,
    in_batches,
    sum_of_losses,
)
from factorized.nn.running import evaluation_mode

REPLACED, KEPT = 0.8, 0.1  # of the tokens to guess: replaced by [MASK], left as they are; the rest are drawn anew


class MaskedTask(RunningText):
    """Guess 15 % of the tokens of a sequence from the others."""

    score = "loss"

    @cached_property
    def examples(self) -> Windows:
        """Training text, cut into sequences that leave room for [CLS] and [SEP]."""
        (train,) = self.corpus.texts["train"]
        return Windows(train, self.recipe.data.length - 2, self.recipe.data.length - 2, "training")

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Stack sequences and mask some of their tokens."""
        return self._masked(examples, None)

    def measure(self, model: nn.Module, part: str) -> dict[str, float]:
        """Return loss and accuracy on a part, masked in one fixed way."""
        (texts,) = self.corpus.texts[part]
        length = min(self.recipe.data.length - 2, len(texts.tokens))
        draws = torch.Generator().manual_seed(0)
        total, right, count = torch.zeros((), dtype=torch.float64), 0, 0
        with evaluation_mode(model), torch.no_grad():
            for some in in_batches(Windows(texts, length, length, part), self.recipe.run.batch):
                batch = {name: tensor.to(device_of(model)) for name, tensor in self._masked(some, draws).items()}
                labels = batch.pop("labels")
                logits = model(**batch).logits
                total += sum_of_losses(logits, labels).double().cpu()
                right += int((logits.argmax(-1) == labels).sum())
                count += int(labels.ne(IGNORED).sum())
        return {"loss": total.item() / count, "accuracy": 100 * right / count}

    def _masked(self, examples: Sequence[Example], draws: torch.Generator | None) -> Batch:
        tokens = torch.from_numpy(np.stack([example["input_ids"] for example in examples]))
        ends = tokens.new_full((len(tokens), 1), self.tokenizer.sep_token_id)
        starts = torch.full_like(ends, self.tokenizer.cls_token_id)
        tokens = torch.cat([starts, tokens, ends], dim=1)
        return mask_tokens(tokens, self.tokenizer, self.recipe.data.mask, draws)


def mask_tokens(
    tokens: Tensor,  # (batch, length)
    tokenizer: Any,
    share: float,
    draws: torch.Generator | None = None,
) -> Batch:
    """Choose ``share`` of the tokens to be guessed: of these, 80 % become [MASK], 10 % another token, 10 % stay."""
    ordinary = ~torch.isin(tokens, torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id]))
    guessed = ordinary & (torch.rand(tokens.shape, generator=draws) < share)
    guessed[:, 1] |= ~guessed.any(dim=1)  # one at least, or the loss of a short sequence is not a number
    fate = torch.rand(tokens.shape, generator=draws)
    drawn = torch.randint(len(tokenizer), tokens.shape, generator=draws)
    inputs = torch.where(guessed & (fate < REPLACED), torch.full_like(tokens, tokenizer.mask_token_id), tokens)
    inputs = torch.where(guessed & (fate >= REPLACED + KEPT), drawn, inputs)
    return {"input_ids": inputs, "labels": torch.where(guessed, tokens, torch.full_like(tokens, IGNORED))}
