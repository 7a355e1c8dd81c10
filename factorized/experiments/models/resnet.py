"""Residual networks for 32×32 images, as in the paper's appendix C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from factorized.experiments.models.normalized.layers import activate, convolve_activated
from factorized.experiments.models.stem import convolve_images

Shortcut = Literal["pad", "conv"]


class PadShortcut(nn.Module):
    """Halve the image and fill the new channels with zeros: a shortcut without parameters (option A)."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.before, self.after = channels // 2, channels - channels // 2
        self.stride = stride

    def forward(
        self,
        x: Tensor,  # (batch, in, height, width)
    ) -> Tensor:  # (batch, in + channels, height / stride, width / stride)
        """Apply the shortcut."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class Block(nn.Module):
    """Two 3×3 convolutions with batch normalization, and a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if shortcut == "pad" and (stride != 1 or in_channels != out_channels):
            self.shortcut = PadShortcut(out_channels - in_channels, stride)
        elif shortcut == "conv" and (stride != 1 or in_channels != out_channels):
            conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out_channels))

    def forward(
        self,
        x: Tensor,  # (batch, in, height, width)
    ) -> Tensor:  # (batch, out, height / stride, width / stride)
        """Apply the block."""
        y, known = convolve_activated(self.conv1(x), [(self.bn1, self.conv2)])
        return activate(self.bn2, y, self.shortcut(x), known)


class ResNet(nn.Module):
    """A CIFAR residual network: one convolution, three stages of blocks, global average pooling, one linear layer."""

    def __init__(self, depth: int, widths: Sequence[int], shortcut: Shortcut, classes: int, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2 with n >= 1 (20, 32, 44, 56, 110), got {depth}")
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        incoming = [widths[0], *widths[:-1]]
        self.stages = nn.Sequential(
            *(
                _stage(before, width, (depth - 2) // 6, 1 if index == 0 else 2, shortcut)
                for index, (before, width) in enumerate(zip(incoming, widths, strict=True))
            )
        )
        self.linear = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width)
    ) -> Tensor:  # (batch, classes)
        """Classify a batch of images."""
        x = self.stages(activate(self.bn1, convolve_images(self.conv1, x)))
        return self.linear(x.mean(dim=(2, 3)))


def resnet(depth: int = 32, classes: int = 10, channels: int = 3) -> ResNet:
    """Return ResNet-20/32/44/56/110 with 16, 32 and 64 channels and parameter-free shortcuts."""
    return ResNet(depth, (16, 32, 64), "pad", classes, channels)


def resnet32x2(classes: int = 10, channels: int = 3) -> ResNet:
    """Return the paper's ResNet-32x2: 64, 128 and 256 channels, 1×1 convolutions as shortcuts."""
    return ResNet(32, (64, 128, 256), "conv", classes, channels)


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int, shortcut: Shortcut) -> nn.Sequential:
    first = Block(in_channels, out_channels, stride, shortcut)
    return nn.Sequential(first, *(Block(out_channels, out_channels, 1, shortcut) for _ in range(blocks - 1)))
