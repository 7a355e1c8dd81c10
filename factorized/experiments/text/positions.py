"""Masked language models that compute logits at given positions only: those of the masked tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from factorized.nn.running import removing


def take_positions(model: Any) -> Sequence[RemovableHandle]:
    """Let ``model`` take ``positions``, (batch, predicted), and return the logits at these only.

    15 % of the tokens are predicted, and in a small BERT the output layer, which is as wide as the vocabulary, costs as
    much as all others together. A model that never calls its output layer, such as MobileBERT, computes all logits, and
    the others are dropped. Called without ``positions``, the model returns all logits as before.
    """
    wanted: list[Tensor | None] = [None]  # until they are chosen

    def take(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        wanted[0] = keywords.get("positions")
        return arguments, {name: value for name, value in keywords.items() if name != "positions"}

    def chosen(
        tensor: Tensor,  # (batch, length, ...)
        positions: Tensor,
    ) -> Tensor:  # (batch, predicted, ...)
        wanted[0] = None
        return tensor[torch.arange(len(tensor), device=tensor.device)[:, None], positions]

    def choose_hidden(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = arguments
        return arguments if wanted[0] is None else (chosen(hidden, wanted[0]), *others)

    def choose_logits(module: nn.Module, arguments: Any, output: Any) -> None:
        if wanted[0] is not None:
            output.logits = chosen(output.logits, wanted[0])

    head: nn.Module | None = model.get_output_embeddings()
    hooks = [model.register_forward_pre_hook(take, with_kwargs=True), model.register_forward_hook(choose_logits)]
    return hooks if head is None else [*hooks, head.register_forward_pre_hook(choose_hidden)]


@contextmanager
def taking_positions(model: nn.Module) -> Iterator[None]:
    """Let ``model`` take ``positions`` within this context, also if it takes them already."""
    with removing(take_positions(model)):
        yield
