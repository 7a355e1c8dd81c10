"""Small networks that are trained on the spot, in a minute or less on one core, to be compressed by other benchmarks.

Two for the digits, one with biases and one with BatchNorm in their place, and a language model of bytes on Python's
documentation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from factorized.experiments.data.digits import load_digits
from factorized.experiments.text.embedded import python_documentation


class Task(ABC):
    """A network, its data, how it is trained and what it is judged by."""

    name: str
    score: ClassVar[str]
    steps: ClassVar[int]  # of the whole training
    lr: ClassVar[float] = 2e-3
    strength: ClassVar[float] = 1e-2  # of the decay, decoupled from the gradient

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the network, drawn from the current random state."""

    @abstractmethod
    def training(self) -> Iterator[Any]:
        """Yield training batches without end."""

    @abstractmethod
    def loss(self, outputs: Any, *rest: Tensor) -> Tensor:
        """Return the loss of a batch."""

    @property
    @abstractmethod
    def calibration(self) -> list[Any]:
        """Training batches to calibrate with."""

    @abstractmethod
    def measure(self, model: nn.Module) -> float:
        """Return the score on the test set."""

    def train(self, model: nn.Module) -> None:
        """Train with AdamW and Frobenius decay of attention's products; the rate rises and falls to zero."""
        groups = fz.parameter_groups(model, weight_decay=self.strength)
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        if fz.forms(model):
            fz.FrobeniusDecay(model, self.strength, decoupled=True).attach(optimizer)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, self.steps, pct_start=0.1)
        model.train()
        for batch in islice(self.training(), self.steps):
            inputs, *rest = batch
            optimizer.zero_grad()
            self.loss(model(inputs), *rest).backward()
            optimizer.step()
            schedule.step()
        model.eval()


class Digits(Task):
    """Three convolutions and two linears, with BatchNorm in the place of biases if ``normalized``."""

    score, steps = "accuracy", 150

    def __init__(self, normalized: bool) -> None:
        self.name = "digits, BatchNorm" if normalized else "digits, biases"
        self.normalized, images = normalized, load_digits()
        self.x, self.test = images.x_train.float() / 255, images.x_test.float() / 255
        self.y, self.expected = images.y_train, images.y_test

    def build(self) -> nn.Module:
        """Return the network."""
        parts: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 1)):
            parts += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=not self.normalized)]
            parts += [nn.BatchNorm2d(outputs)] if self.normalized else []
            parts += [nn.ReLU()]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))

    def training(self) -> Iterator[Any]:
        """Yield shuffled batches."""
        while True:
            for rows in torch.randperm(len(self.x)).split(96):
                yield self.x[rows], self.y[rows]

    def loss(self, outputs: Any, *rest: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(outputs, *rest)

    @property
    def calibration(self) -> list[Any]:
        """The training set."""
        return list(zip(self.x.split(128), self.y.split(128), strict=True))

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """Return the share of the test set that is classified correctly, in percent."""
        return 100 * (model.eval()(self.test).argmax(1) == self.expected).float().mean().item()


class Bytes(Task):
    """A Llama of three layers that predicts the next byte of Python's documentation."""

    name, score, steps, length = "language model", "perplexity", 400, 64

    def __init__(self) -> None:
        text = "\n".join(part for (part,) in python_documentation()).encode()
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        rows = tokens[: len(tokens) // self.length * self.length].view(-1, self.length)
        held_out = torch.arange(len(rows)) % 20 == 0
        self.rows, self.test = rows[~held_out], rows[held_out][:200]

    def build(self) -> nn.Module:
        """Return the network."""
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=self.length))
        return model

    def training(self) -> Iterator[Any]:
        """Yield shuffled batches."""
        while True:
            for rows in torch.randperm(len(self.rows)).split(16):
                yield self.rows[rows], self.rows[rows]

    def loss(self, outputs: Any, *rest: Tensor) -> Tensor:
        """Return the cross-entropy of the next bytes."""
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), rest[0][:, 1:].flatten())

    @property
    def calibration(self) -> list[Any]:
        """Some of the training text: 32,768 bytes."""
        rows = self.rows[:: len(self.rows) // 512][:512]
        return [(some, some) for some in rows.split(32)]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """Return the perplexity per byte of text that was held out."""
        losses = [self.loss(model.eval()(some), some).item() for some in self.test.split(50)]
        return math.exp(sum(losses) / len(losses))


def tasks() -> list[Task]:
    """Return all of them."""
    return [Digits(normalized=False), Digits(normalized=True), Bytes()]
