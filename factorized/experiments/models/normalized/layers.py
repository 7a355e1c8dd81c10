"""Apply norm, ReLU and convolution: by joint kernels if they can run the layers, else one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from factorized._torch import is_exporting, is_known, is_traced, is_transformed
from factorized.experiments.models.normalized import tiles
from factorized.experiments.models.normalized.activations import normalized_activation
from factorized.experiments.models.normalized.convolutions import SAME, Layer, normalized_convolutions
from factorized.experiments.models.normalized.statistics import Parts, followed, measured
from factorized.formats.thin import DTYPES, PLAIN, can_build_kernels, computing_type
from factorized.nn.conv import FactorizedConv2d
from factorized.planning.replaceable import HOOKS

LARGEST_RANK = 64  # of layers that the kernels run
LEAST_CHANNELS = 64  # the compiler was not compared with them on narrower layers


def activate(
    norm: nn.BatchNorm2d,
    x: Tensor,  # (batch, channels, height, width)
    shortcut: Tensor | None = None,  # like x
    known: Parts | None = None,  # the statistics of x, if they are
    twice: bool = False,  # whether compiled code computes it again for the backward pass, in place of keeping it
) -> Tensor:  # like x
    """Return relu(norm(x) + shortcut)."""
    if _has_gpu_kernels(x) and norm_suits(x, norm):
        x = as_read(x)
        found = followed(norm, known or measured(x), x.numel() // x.shape[1])
        return normalized_activation(x, norm.weight, norm.bias, found, shortcut, norm.eps, twice)
    y = norm(x)
    fresh = type(norm) is nn.BatchNorm2d and type(x) in PLAIN  # other norms may return x; fx records for later callers
    if not fresh or has_hooks(norm) or is_traced():  # or the result may be kept
        return F.relu(y if shortcut is None else y + shortcut)
    return F.relu(y if shortcut is None else y.add_(shortcut), inplace=True)


def convolve_activated(
    x: Tensor,  # (batch, channels, height, width)
    layers: Sequence[Layer],
) -> tuple[Tensor, Parts | None]:
    """Apply norm, ReLU and convolution of every layer; return the result and, if they are known, its statistics."""
    if kernels_apply(x, layers):
        x = as_read(x)
        return normalized_convolutions(x, measured(x), None, layers)
    for norm, conv in layers:
        x = conv(activate(norm, x))
    return x, None


def as_read(x: Tensor) -> Tensor:
    """Return a tensor as the kernels read it: channels-last, in the type that convolutions compute in."""
    return x.to(computing_type(x)).contiguous(memory_format=torch.channels_last)


def kernels_apply(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Return whether the kernels can run layers on the device of their input."""
    return _has_gpu_kernels(x) and kernels_suit(x, layers)


def _has_gpu_kernels(x: Tensor) -> bool:
    return type(x) in PLAIN and x.is_cuda and can_build_kernels(x.device)


def kernels_suit(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Return whether the kernels support these layers, on any device: plain ones, trained in half precision."""
    return (
        all(norm_suits(x, norm) and norm.eps == layers[0][0].eps for norm, _ in layers)
        and is_known(x.shape[3] <= tiles.TILES.positions)  # a row of an image is in one tile
        and all(_is_plain_convolution(conv) and conv.chosen_execution(x) == "products" for _, conv in layers)
    )


def norm_suits(x: Tensor, norm: Any) -> bool:
    """Return whether the kernels support a norm, on any device: a plain one, trained in half precision."""
    return (
        _is_plain_norm(norm)
        and x.dim() == 4
        and all(is_known(extent > 0) for extent in x.shape)
        and is_known(x.numel() // x.shape[1] * norm.num_features < 2**31)
        and computing_type(x) in DTYPES
        and torch.is_autocast_enabled(x.device.type)  # so that factors and norms may be float32
        and not is_exporting()
        and not is_transformed()
        and (torch.compiler.is_compiling() or not is_traced())
    )


def _is_plain_norm(norm: Any) -> bool:
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and all(type(tensor) in PLAIN for tensor in (*norm.parameters(), norm.running_mean, norm.running_var))
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
    """Return whether a call of the module also runs hooks, which a kernel in its place would skip."""
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS) or bool(_has_any_global_hook())
