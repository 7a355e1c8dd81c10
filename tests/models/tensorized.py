"""Small models with layers in every format that is no product, for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import factorized as fz
from factorized.nn.layer import FactorizedLayer

SCHEMES = {
    "train": fz.TensorTrain(),
    "tucker": fz.Tucker(),
    "tucker-train-core": fz.Tucker(core="train"),
    "separable-train": fz.TensorTrain(separable=True),
    "separable-tucker": fz.Tucker(separable=True),
    "monarch": fz.Monarch(blocks=2),
}


def dense(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small network of convolutions and linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 24),
        nn.ReLU(),
        nn.Linear(24, 5),
    ).to(dtype)


def tensorized(kind: str, dtype: torch.dtype = torch.float64, init: str = "spectral") -> nn.Module:
    """Return the network with its inner layers in such a format, at rank 2 everywhere."""
    return fz.factorize(dense(dtype), SCHEMES[kind], rank=2, init=init)  # type: ignore[arg-type]


def layers(model: nn.Module) -> dict[str, FactorizedLayer]:
    """Return the factorized layers by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, FactorizedLayer)}


def cores(model: nn.Module) -> list[nn.Parameter]:
    """Return the cores that are decayed, of all layers."""
    return [core for layer in layers(model).values() for core in layer.factors[: layer.format.decayed[1]]]


def images(count: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a batch for the network."""
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
