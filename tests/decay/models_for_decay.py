"""Models with every kind of product, and one way to train them, for the tests of decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import factorized as fz
from factorized.nn.layer import FactorizedLayer

STRENGTH = 0.3


class Mixed(nn.Module):
    """Low rank, overcomplete, deep and grouped products, some of one shape, their ranks equal or one apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = fz.FactorizedEmbedding(11, 12, 3)
        self.conv = fz.FactorizedConv2d(12, 16, 3, 5, padding=1)
        self.grouped = fz.FactorizedConv2d(16, 12, 3, 3, padding=1, groups=2, depth=1)
        self.norm = nn.BatchNorm2d(12)
        self.up = nn.ModuleList(fz.FactorizedLinear(12, 14, rank) for rank in (3, 4))
        self.down = nn.ModuleList(fz.FactorizedLinear(14, 12, rank) for rank in (5, 5))
        self.square = nn.ModuleList(fz.FactorizedLinear(12, 12, rank, bias=False) for rank in (3, 3))
        self.deep = fz.FactorizedLinear(12, 10, 4, depth=2)
        self.wide = fz.FactorizedLinear(10, 10, 14)
        self.head = nn.Linear(10, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).movedim(-1, 1)
        x = self.norm(self.grouped(torch.tanh(self.conv(x)))).mean(dim=(2, 3))
        for up, down, square in zip(self.up, self.down, self.square, strict=True):
            x = x + square(torch.tanh(down(torch.tanh(up(x)))))
        return self.head(torch.tanh(self.wide(self.deep(x))))


def shaken(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the model with no parameter left special: the inner matrices are no identities."""
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return shaken(Mixed())


def layers(model: nn.Module) -> dict[str, FactorizedLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FactorizedLayer)}


def by_weights(model: nn.Module, strength: float = STRENGTH) -> Tensor:
    """Return Σ λ/2 ‖W‖² from the composed weights: what the decay has to be."""
    return 0.5 * strength * sum(layer.weight.square().sum() for layer in layers(model).values())


def batch(step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (size, 4, 4), generator=generator)
    return tokens, torch.randint(0, 5, (size,), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens, classes = batch(step)
    return F.cross_entropy(model(tokens), classes)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: Iterable[int] = range(4),
    penalty: Callable[[], Tensor] | None = None,
    before_step: Callable[[], None] = lambda: None,
    set_to_none: bool = True,
) -> nn.Module:
    """Train on fixed batches, with ``penalty`` in the loss and something done between backward and step."""
    for step in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, step)
        (loss if penalty is None else loss + penalty()).backward()
        before_step()
        optimizer.step()
    return model


def shrink_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    """Take lr·∂ of the penalty off every factor at once, as a decoupled decay does."""
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    factors = [factor for layer in layers(model).values() for factor in layer.factors]
    with torch.no_grad():
        for factor, gradient in zip(factors, gradients_of_decay(model), strict=True):
            factor -= rates[factor] * gradient


def gradients_of_decay(model: nn.Module) -> tuple[Tensor, ...]:
    factors = [factor for layer in layers(model).values() for factor in layer.factors]
    with torch.enable_grad():
        return torch.autograd.grad(by_weights(model), factors)


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between the parameters of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


def twins(count: int = 2) -> list[nn.Module]:
    model = mixed()
    return [deepcopy(model) for _ in range(count)]
