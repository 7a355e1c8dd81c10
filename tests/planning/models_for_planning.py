"""Small models to plan for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Convolutions with strides, groups, a pointwise one and BatchNorm; takes (batch, 3, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.body = nn.Sequential(
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, (5, 3), padding=(2, 1), groups=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 1),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.stem(x)).relu()).mean((2, 3)))


class Mlp(nn.Module):
    """Linear layers of unequal shapes; takes (batch, 20)."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(20, 48)
        self.wide = nn.Linear(48, 96)
        self.square = nn.Linear(96, 96)
        self.narrow = nn.Linear(96, 24, bias=False)
        self.outlet = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.narrow(self.square(self.wide(self.inlet(x).relu()).relu()).relu()))


class Reader(nn.Module):
    """Two embeddings and linears; takes whole numbers below 300 as (batch, length), and optionally their shift."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(300, 32)
        self.more_tokens = nn.Embedding(300, 32)
        self.mix = nn.Linear(32, 64)
        self.output = nn.Linear(64, 300)

    def forward(self, ids: Tensor, shift: int = 0) -> Tensor:
        return self.output(self.mix(self.tokens(ids) + self.more_tokens((ids + shift) % 300)))


class TiedReader(nn.Module):
    """An output layer that reads the embedding's table; takes whole numbers below 200."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(200, 32)
        self.mix = nn.Linear(32, 32)
        self.output = nn.Linear(32, 200)
        self.output.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.mix(self.tokens(ids)))


class Attends(nn.Module):
    """One attention unit between two linears, and two in the middle; takes (batch, length, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.hidden = nn.Linear(16, 64)
        self.back = nn.Linear(64, 16)
        self.outlet = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.outlet(self.back(self.hidden(x).relu()))


class ResNet32(nn.Module):
    """The CIFAR residual network of 32 layers, 16-32-64 wide, with shortcuts that have no parameters (option A)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = [16] * 5 + [32] * 5 + [64] * 5
        self.blocks = nn.Sequential(*(_Block(i, o) for i, o in zip([16, *widths], widths, strict=False)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.surplus = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.surplus))
        return (self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())) + shortcut).relu()


EXAMPLES: dict[type[nn.Module], Tensor] = {
    ConvNet: torch.zeros(2, 3, 16, 16),
    Mlp: torch.zeros(3, 20),
    Reader: torch.zeros(2, 7, dtype=torch.long),
    TiedReader: torch.zeros(2, 7, dtype=torch.long),
    Attends: torch.zeros(2, 5, 16),
    ResNet32: torch.zeros(1, 3, 32, 32),
}


def with_singular_values(layer: nn.Linear, values: list[float]) -> None:
    """Give a linear layer a random weight with these singular values, then zeros."""
    generator = torch.Generator().manual_seed(layer.in_features * 1000 + layer.out_features)
    random = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(random, full_matrices=False)
    S = torch.zeros_like(S)
    S[: len(values)] = torch.tensor(values, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(U * S @ Vh)
