"""Masked language models that compute logits at given positions only: those of the masked tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from factorized.nn.running import removing


def take_positions(model: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Let ``model`` take ``positions``, (batch, predicted), and return the logits at these only.

    15 % of the tokens are predicted, and in a small BERT the output layer, which is as wide as the vocabulary, costs as
    much as all others together. Called without ``positions``, the model returns all logits as before.
    """
    head = output_layer(model)
    wanted: list[Tensor | None] = [None]

    def take(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        wanted[0] = keywords.get("positions")
        return arguments, {name: value for name, value in keywords.items() if name != "positions"}

    def choose(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = arguments  # (batch, length, hidden)
        if wanted[0] is None:
            return arguments
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        return (hidden[rows, wanted[0]], *others)

    return model.register_forward_pre_hook(take, with_kwargs=True), head.register_forward_pre_hook(choose)


@contextmanager
def taking_positions(model: nn.Module) -> Iterator[None]:
    """Let ``model`` take ``positions`` within this context, also if it takes them already."""
    with removing(take_positions(model)):
        yield


def output_layer(model: Any) -> nn.Module:
    """Return the layer that turns hidden states into logits."""
    found: nn.Module | None = model.get_output_embeddings()
    if found is None:
        raise ValueError(
            f"{type(model).__name__}.get_output_embeddings() returned None; expected the layer that computes the "
            "logits: override that method to return it"
        )
    return found
