"""WideResNet-28-10 as the paper's tensor experiments have it, with plain convolutions as shortcuts."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """BatchNorm, ReLU and convolution, twice, around a shortcut that is a 1×1 convolution where the shape changes."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(i), nn.BatchNorm2d(o)
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(i, o, 1, stride, bias=False) if i != o else None

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        y = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        return y + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """Three stages of residual blocks, ``width`` times as wide as a ResNet's."""

    def __init__(self, depth: int = 28, width: int = 10, classes: int = 10) -> None:
        super().__init__()
        blocks, widths = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.stages = nn.Sequential(
            *(
                Block(i if n == 0 else o, o, (1 if stage == 0 else 2) if n == 0 else 1)
                for stage, (i, o) in enumerate(pairwise(widths))
                for n in range(blocks)
            )
        )
        self.bn = nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stages(self.conv1(x))))
        return self.fc(x.mean((2, 3)))
