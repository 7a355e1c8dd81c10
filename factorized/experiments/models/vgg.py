"""VGG-19 without fully connected layers (NFC), as in the paper's table 1."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from factorized.experiments.models.normalized.layers import activate, has_hooks
from factorized.experiments.models.stem import convolve_images

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels, convolutions


class Stage(nn.Sequential):
    """Convolutions, each with its batch normalization and ReLU."""

    def forward(
        self,
        x: Tensor,  # (batch, in, height, width)
    ) -> Tensor:  # (batch, out, height, width)
        """Run the layers."""
        layers: list[Any] = list(self)
        if len(layers) % 3 or any(type(relu) is not nn.ReLU or has_hooks(relu) for relu in layers[2::3]):
            return super().forward(x)  # type: ignore[no-untyped-call]
        for conv, norm in zip(layers[::3], layers[1::3], strict=True):
            x = activate(norm, convolve_images(conv, x))
        return x


class Vgg(nn.Module):
    """Five stages of 3×3 convolutions with batch normalization, an average pool, one linear layer."""

    def __init__(self, classes: int, pool: int, channels: int) -> None:
        super().__init__()
        if pool < 1:
            raise ValueError(
                f"pool must be the side of the last feature map, the image's side // 16: 2 for 32×32, 4 for 64×64; "
                f"got {pool}"
            )
        self.pool = pool
        incoming = [channels, *(width for width, _ in STAGES[:-1])]
        self.stages = nn.ModuleList(
            _stage(before, width, count) for before, (width, count) in zip(incoming, STAGES, strict=True)
        )
        self.linear = nn.Linear(STAGES[-1][0], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)  # N(0, 2/(k²·in))
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width)
    ) -> Tensor:  # (batch, classes)
        """Classify a batch of images."""
        for index, stage in enumerate(self.stages):
            x = stage(x if index == 0 else F.max_pool2d(x, 2))
        return self.linear(F.avg_pool2d(x, self.pool).flatten(1))


def vgg19_nfc(classes: int = 10, pool: int = 2, channels: int = 3) -> Vgg:
    """Return the paper's VGG-19 NFC; ``pool`` is 2 for images of 32×32, 4 for Tiny-ImageNet's 64×64."""
    return Vgg(classes, pool, channels)


def _stage(in_channels: int, out_channels: int, convolutions: int) -> Stage:
    layers: list[nn.Module] = []
    for index in range(convolutions):
        conv = nn.Conv2d(in_channels if index == 0 else out_channels, out_channels, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(out_channels), nn.ReLU()]
    return Stage(*layers)
