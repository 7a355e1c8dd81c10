"""The first convolution of a network, which sees the few channels of images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized._torch import is_exporting
from factorized.experiments.models.normalized.layers import has_hooks
from factorized.formats.thin import DTYPES, PLAIN, computing_type

MULTIPLE = 8  # of channels, for which cuDNN has kernels that use tensor cores


def convolve_images(
    conv: Any,
    x: Tensor,  # (batch, channels, height, width)
) -> Tensor:  # (batch, out, height', width')
    """Apply a convolution; on a GPU in half precision to as many channels as its kernels like, the others zeros."""
    if type(x) in PLAIN and x.is_cuda and gains_by_zeros(conv, x):
        return convolve_with_zeros(conv, x)
    y: Tensor = conv(x)
    return y


def convolve_with_zeros(
    conv: nn.Conv2d,
    x: Tensor,  # (batch, channels, height, width)
) -> Tensor:  # (batch, out, height', width')
    """Apply a convolution to its channels and to as many zeros as make their number a multiple."""
    zeros = (0, 0, 0, 0, 0, -conv.in_channels % MULTIPLE)
    weight = F.pad(conv.weight, zeros)
    return F.conv2d(F.pad(x, zeros), weight, conv.bias, conv.stride, conv.padding, conv.dilation)


def gains_by_zeros(conv: Any, x: Tensor) -> bool:
    """Return whether a convolution would run faster with more channels, on any device."""
    return (
        type(conv) is nn.Conv2d
        and conv.in_channels % MULTIPLE != 0
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and computing_type(x) in DTYPES
        and torch.is_autocast_enabled(x.device.type)  # so that the weight may be float32
        and not has_hooks(conv)
        and not is_exporting()
    )
