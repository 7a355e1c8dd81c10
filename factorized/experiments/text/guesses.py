"""Masked language models whose output layer, which is as wide as the vocabulary, sees the tokens to guess alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def guess_alone(model: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Let ``model`` take ``positions``, (batch, guessed), and return the logits of those tokens alone.

    15 % of the tokens are guessed, and in a small BERT the output layer costs as much as all others together. Called
    without ``positions`` the model is what it was.
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
def guessing_alone(model: nn.Module) -> Iterator[None]:
    """Let ``model`` take ``positions`` for a while; one that takes them already goes on as before."""
    handles = guess_alone(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def output_layer(model: Any) -> nn.Module:
    """Return the layer that turns hidden states into logits."""
    found: nn.Module | None = model.get_output_embeddings()
    if found is None:
        raise ValueError(
            f"{type(model).__name__}.get_output_embeddings() returned None; expected the layer that computes the "
            "logits: override that method to return it"
        )
    return found
