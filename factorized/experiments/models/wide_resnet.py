"""Wide residual networks, as in the paper's table 2: batch normalization and ReLU before each convolution."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from factorized.experiments.models.normalized.convolutions import Layer, normalized_convolutions
from factorized.experiments.models.normalized.layers import activate, as_read, has_hooks, kernels_apply
from factorized.experiments.models.normalized.statistics import measured
from factorized.experiments.models.stem import convolve_images
from factorized.nn.layer import FactorizedLayer


class WideBlock(nn.Module):
    """Two 3×3 convolutions, each after its batch normalization and ReLU, and a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(
        self,
        x: Tensor,  # (batch, in, height, width)
    ) -> Tensor:  # (batch, out, height / stride, width / stride)
        """Apply the block."""
        y = activate(self.bn1, x, twice=_is_separable(self.conv1))
        # a shortcut with a convolution starts after the first activation, one without before it
        shortcut = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(activate(self.bn2, self.conv1(y), twice=_is_separable(self.conv2))) + shortcut


class Stage(nn.Sequential):
    """Wide blocks of as many channels.

    While it is trained at low rank on a GPU, kernels run all but the first convolution, and normalize its input.
    """

    def forward(
        self,
        x: Tensor,  # (batch, in, height, width)
    ) -> Tensor:  # (batch, out, height / stride, width / stride)
        """Run the blocks."""
        if not (self.is_plain and kernels_apply(x, self.layers)):
            return super().forward(x)  # type: ignore[no-untyped-call]
        first: Any = self[0]
        y = activate(first.bn1, x)
        shortcut = x if first.shortcut is None else first.shortcut(y)
        y = as_read(first.conv1(y))
        y, known = normalized_convolutions(y, measured(y), shortcut, self.layers[:1])
        for place in range(1, len(self.layers), 2):
            y, known = normalized_convolutions(y, known, y, self.layers[place : place + 2])
        return y

    @property
    def is_plain(self) -> bool:
        """Whether calling the blocks runs only the code in this file."""
        return all(type(block) is WideBlock and not has_hooks(block) for block in self)

    @property
    def layers(self) -> list[Layer]:
        """Norms and convolutions one after another, without those that the first block begins with."""
        blocks: list[Any] = list(self)
        return [pair for block in blocks for pair in ((block.bn1, block.conv1), (block.bn2, block.conv2))][1:]


class WideResNet(nn.Module):
    """One convolution, three stages of wide blocks, global average pooling, one linear layer; no dropout."""

    def __init__(self, depth: int, width: int, classes: int, channels: int) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6n + 4 with n >= 1 (16, 22, 28, 40), got {depth}")
        if width < 1:
            raise ValueError(
                f"width must be a whole number of at least 1, the factor on 16, 32 and 64 channels; got {width}"
            )
        widths = [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stages = nn.Sequential(
            *(
                _stage(widths[index], widths[index + 1], (depth - 4) // 6, stride)
                for index, stride in enumerate((1, 2, 2))
            )
        )
        self.bn = nn.BatchNorm2d(widths[-1])
        self.linear = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")  # N(0, 2/(k²·out))
        nn.init.zeros_(self.linear.bias)

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width)
    ) -> Tensor:  # (batch, classes)
        """Classify a batch of images."""
        x = activate(self.bn, self.stages(convolve_images(self.conv1, x)))
        return self.linear(x.mean(dim=(2, 3)))


def wide_resnet(depth: int = 28, width: int = 10, classes: int = 10, channels: int = 3) -> WideResNet:
    """Return WideResNet-``depth``-``width``; the paper's is 28-10."""
    return WideResNet(depth, width, classes, channels)


def _is_separable(conv: nn.Module) -> bool:
    """Return whether a convolution has two parts, and keeps the input of each for its gradients."""
    return isinstance(conv, FactorizedLayer) and "depthwise" in conv.format.cores


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int) -> Stage:
    first = WideBlock(in_channels, out_channels, stride)
    return Stage(first, *(WideBlock(out_channels, out_channels, 1) for _ in range(blocks - 1)))
