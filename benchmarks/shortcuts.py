"""ResNet-32x2 as the authors' code leaves it once it is factorized: its shortcuts have no norm.

    factorized train cifar10/resnet32x2-lowrank-0.1-si --data DIR --set model.name=benchmarks.shortcuts:bare_resnet32x2

That code puts one factorized convolution in place of a whole shortcut: the 1×1 convolution and the BatchNorm after it.
"""

from __future__ import annotations

from torch import nn

from factorized.experiments.models.resnet import Block, ResNet, resnet32x2


def bare_resnet32x2(classes: int, channels: int) -> ResNet:
    """Return ResNet-32x2 with bare 1×1 convolutions as shortcuts."""
    model = resnet32x2(classes, channels)
    for block in model.modules():
        if isinstance(block, Block) and isinstance(block.shortcut, nn.Sequential):
            block.shortcut = block.shortcut[0]
    return model
