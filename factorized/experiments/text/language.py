"""Causal language models: the next token of running text; perplexity per word, whatever the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factorized.experiments.text.models import most_tokens
from factorized.experiments.text.task import (
    IGNORED,
    Batch,
    Example,
    RunningText,
    Windows,
    device_of,
    in_batches,
    totals,
)
from factorized.nn.running import evaluation_mode

HIGHEST = 700.0  # loss per word; the exponential of more overflows


class LanguageTask(RunningText):
    """Predict each token from those before it."""

    score = "perplexity"

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Stack sequences; each is its own label, which the loss shifts."""
        tokens = torch.from_numpy(np.stack([example["input_ids"] for example in examples]))
        return {"input_ids": tokens, "labels": tokens.clone()}

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """Compare the prediction at each token with the next one."""
        return super().loss(outputs, _next(labels), num_items_in_batch)

    def measure(self, model: nn.Module, part: str) -> dict[str, float]:
        """Return loss per token and perplexity per word of a part, every token but the first measured once.

        Sequences overlap by the token that begins the next.
        """
        (texts,) = self.corpus.texts[part]
        length = min(self.recipe.data.length, len(texts.tokens))
        windows = Windows(texts, length, length - 1, part)
        rest = np.asarray(texts.tokens[len(windows) * (length - 1) :], dtype=np.int64)
        some = [*in_batches(windows, self.recipe.run.batch), *([[{"input_ids": rest}]] if len(rest) > 1 else [])]
        batches = (self.collate(examples) for examples in some)
        found = totals(model, (batch | {"labels": _next(batch["labels"])} for batch in batches))
        per_word = found.loss / max(1, texts.words)
        return {"loss": found.loss / found.labels, "perplexity": math.exp(min(per_word, HIGHEST))}


def _next(
    tokens: Tensor,  # (examples, length)
) -> Tensor:  # (examples, length)
    """Return what follows each token, as labels."""
    return F.pad(tokens[:, 1:], (0, 1), value=IGNORED)


def continue_text(model: Any, tokenizer: Any, prompt: str, tokens: int, *, draw: bool) -> str:
    """Return ``prompt`` with ``tokens`` more tokens: drawn, or the likeliest ones."""
    # as in training, which puts no token before a text, and one after it only where it ends
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
    if not inputs["input_ids"].numel():
        inputs = {"input_ids": torch.tensor([[tokenizer.eos_token_id]])}
    inputs = {name: tensor.to(device_of(model)) for name, tensor in inputs.items()}
    try:
        with evaluation_mode(model), torch.no_grad():
            outputs = model.generate(**inputs, max_new_tokens=tokens, do_sample=draw)
    except (IndexError, RuntimeError) as error:
        given, most = inputs["input_ids"].shape[1], most_tokens(model)
        if most is None or given + tokens <= most:
            raise
        raise ValueError(
            f"the model takes {most} tokens, and the text has {given}, with {tokens} to add; ask for fewer --tokens, "
            "or give the end of the text"
        ) from error
    return str(tokenizer.decode(outputs[0], skip_special_tokens=True))
