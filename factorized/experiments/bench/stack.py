"""A stack of square linear layers to measure growth on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from factorized.decay.frobenius import FrobeniusDecay
from factorized.decay.groups import parameter_groups
from factorized.nn.linear import FactorizedLinear


@dataclass(frozen=True)
class Stack:
    """A stack of square linear layers, at a rank or dense (0), and the rows of its batch."""

    width: int = 1024
    rank: int = 64
    depth: int = 4
    rows: int = 256

    def build(self, device: torch.device) -> nn.Module:
        """Return the layers."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        with device:
            for _ in range(self.depth):
                if self.rank:
                    layers.append(FactorizedLinear(self.width, self.width, self.rank, bias=False, init="kaiming"))
                else:
                    layers.append(nn.Linear(self.width, self.width, bias=False))
        return nn.Sequential(*layers)

    def step(self, model: nn.Module) -> Callable[[], object]:
        """Return a training step with AdamW, and Frobenius decay where there are products."""
        device = next(model.parameters()).device
        x = torch.randn(self.rows, self.width, device=device)
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4)
        if self.rank:
            FrobeniusDecay(model, 1e-4, decoupled=True).attach(optimizer)

        def run() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return run
