"""Norm, ReLU and convolution as one: by kernels where these can run the layers, else one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized._torch import is_exporting, is_known, is_traced, is_transformed
from factorized.experiments.models.normalized import launches
from factorized.experiments.models.normalized.convolutions import SAME, Layer, measured, normalized_convolutions
from factorized.formats.thin import DTYPES, PLAIN, can_build_kernels, computing_type
from factorized.nn.conv import FactorizedConv2d
from factorized.planning.replaceable import HOOKS

LARGEST_RANK = 64  # of layers that the kernels run
LEAST_CHANNELS = 64  # the compiler was not compared with them on narrower layers


def convolve_activated(
    x: Tensor,  # (batch, channels, height, width)
    layers: Sequence[Layer],
) -> Tensor:
    """Apply norm, ReLU and convolution of every layer."""
    if kernels_apply(x, layers):
        return normalized_convolutions(*measured(x), None, layers)[0]
    for norm, conv in layers:
        x = conv(F.relu(norm(x)))
    return x


def kernels_apply(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Return whether the kernels can run layers on the device of their input."""
    return type(x) in PLAIN and x.is_cuda and kernels_suit(x, layers) and can_build_kernels(x.device)


def kernels_suit(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Return whether layers are ones for the kernels, on whatever device: plain ones, trained in half precision."""
    return (
        x.dim() == 4
        and all(is_known(extent > 0) for extent in x.shape)
        and is_known(x.shape[0] * x.shape[2] * x.shape[3] * layers[0][0].num_features < 2**31)
        and is_known(x.shape[3] <= launches.TILES.positions)  # a row of an image is in one tile
        and computing_type(x) in DTYPES
        and torch.is_autocast_enabled(x.device.type)  # so that factors and norms may be float32
        and all(_is_plain_norm(norm) and norm.eps == layers[0][0].eps for norm, _ in layers)
        and all(_is_plain_convolution(conv) and conv.chosen_execution(x) == "products" for _, conv in layers)
        and not is_exporting()
        and not is_transformed()
        and (torch.compiler.is_compiling() or not is_traced())
    )


def _is_plain_norm(norm: nn.Module) -> bool:
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and not has_hooks(norm)
    )


def _is_plain_convolution(conv: nn.Module) -> bool:
    return (
        type(conv) is FactorizedConv2d
        and conv.kernel_size == (3, 3)
        and conv.geometry == SAME
        and conv.in_channels == conv.out_channels >= LEAST_CHANNELS
        and conv.bias is None
        and conv.adjust is None
        and conv.groups == 1
        and list(conv.format.cores) == ["U", "V"]
        and all(len(factor) == 3 * conv.in_channels for factor in conv.factors)  # a convolution each
        and conv.factors[0].shape[1] <= LARGEST_RANK
        and all(type(factor) in PLAIN for factor in conv.factors)
        and not has_hooks(conv)
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether anything else is to run when the module is called, which a kernel in its place would skip."""
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS)
