"""Stages of low-rank WideResNets that apply batch normalization and ReLU inside the convolutions' kernels.

A block reads and writes its activations about half as often as what the compiler makes of it: statistics are taken
where a tensor is written, it is normalized where it is read, and the gradient of a normalized input is computed twice
from the thin gradient in place of being stored. One operator runs the convolutions of a block forward
(``fused_kernels.py``), another one backward (``fused_gradients.py``). ``fused_times.py`` times them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import fused_launches
from benchmarks.fused_launches import backward_launches, forward_launches
from factorized._torch import is_exporting, is_known, is_traced, is_transformed
from factorized.experiments.models.wide_resnet import WideBlock, WideResNet
from factorized.formats.convolution import Geometry
from factorized.formats.launches import Launch, builder, run_all
from factorized.formats.product import Product
from factorized.formats.thin import DTYPES, PLAIN, can_build_kernels, computing_type
from factorized.nn.conv import FactorizedConv2d
from factorized.planning.replaceable import HOOKS

LARGEST_RANK = 64  # of layers that the kernels run
SAME = Geometry((1, 1), ((1, 1), (1, 1)), (1, 1))  # of a 3×3 kernel: outputs are as large as inputs
Layer = tuple[nn.BatchNorm2d, FactorizedConv2d]


@torch.library.custom_op(
    "factorized_benchmarks::normalized_convolutions",
    mutates_args=(),
    schema="(Tensor x, Tensor parts, int each, Tensor? shortcut, Tensor[] parameters, float epsilon) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _convolutions(
    x: Tensor,  # (batch, channels, height, width), channels-last
    parts: Tensor,  # of the statistics of x, (programs, 2, channels)
    each: int,  # positions of a part
    shortcut: Tensor | None,  # added to the last result; None: x
    parameters: Sequence[Tensor],  # gamma, beta, U, V of one convolution after another
    epsilon: float,
) -> Any:
    """Return the result, parts of its statistics, and what the backward pass needs: all but y are one per layer."""
    results = _empty_results(x, parameters)
    run_all(_forward_launches(x, parts, each, shortcut, epsilon, results, *parameters), x.device)
    return results


@_convolutions.register_fake
def _traced_results(
    x: Tensor, parts: Tensor, each: int, shortcut: Tensor | None, parameters: Sequence[Tensor], epsilon: float
) -> Any:
    if x.is_cuda:
        builder.ask(_forward_launches, x.device, x, parts, each, shortcut, epsilon, None, *parameters)
    return _empty_results(x, parameters)


def _empty_results(x: Tensor, parameters: Sequence[Tensor]) -> Any:
    batch, channels, height, width = x.shape
    layers = len(parameters) // 4
    R = max(16, 1 << (max(U.shape[1] for U in parameters[2::4]) - 1).bit_length())
    norms = x.new_empty((layers, 2, channels), dtype=torch.float32)
    return (
        x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2),
        x.new_empty((fused_launches.TILES.walk(x).splits, 2, channels), dtype=torch.float32),
        x.new_empty((layers - 1, batch, height, width, channels)),
        x.new_empty((layers, batch, height, width, R)),
        x.new_empty((layers, 6 * channels, R)),
        norms,
        torch.empty_like(norms),
    )


def _forward_launches(
    x: Tensor,
    parts: Tensor,
    each: int,
    shortcut: Tensor | None,
    epsilon: float,
    results: Any,  # written; None where kernels are only built
    *parameters: Tensor,
) -> list[Launch]:
    y, y_parts, between, *others = results or _empty_results(x, parameters)
    launches = []
    for number, (source, target) in enumerate(pairwise((x, *_images(between), y))):
        is_last = target is y
        own_parts = y_parts if is_last else torch.empty_like(y_parts)
        residual = (x if shortcut is None else shortcut) if is_last else None
        written = (target, own_parts, *(tensor[number] for tensor in others))
        given = parameters[4 * number : 4 * number + 4]
        launches += forward_launches(source, (parts, each), given, epsilon, residual, written)
        parts, each = own_parts, fused_launches.TILES.walk(x).span
    return launches


def _images(stacked: Tensor) -> list[Tensor]:  # (number, batch, height, width, channels)
    return [tensor.permute(0, 3, 1, 2) for tensor in stacked.unbind()]


@torch.library.custom_op(
    "factorized_benchmarks::normalized_convolutions_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, bool adds, Tensor between, Tensor[] kept, float epsilon) "
    "-> (Tensor, Tensor, Tensor)",
)
def _convolutions_backward(
    gradient: Tensor, x: Tensor, adds: bool, between: Tensor, kept: Sequence[Tensor], epsilon: float
) -> Any:
    """Return the gradients of x, of the factors of every layer in parts, and of beta and gamma of each.

    ``adds`` says that x is the shortcut, so that its gradient gets that of the result as well.
    """
    results = _empty_gradients(x, *kept)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    run_all(_backward_launches(gradient, x, adds, between, epsilon, results, *kept), x.device)
    return results


@_convolutions_backward.register_fake
def _traced_gradients(
    gradient: Tensor, x: Tensor, adds: bool, between: Tensor, kept: Sequence[Tensor], epsilon: float
) -> Any:
    if x.is_cuda:
        builder.ask(_backward_launches, x.device, gradient, x, adds, between, epsilon, None, *kept)
    return _empty_gradients(x, *kept)


def _empty_gradients(x: Tensor, thin: Tensor, packed: Tensor, statistics: Tensor, coefficients: Tensor) -> Any:
    batch, channels, height, width = x.shape
    x_gradient = x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)
    splits, R = fused_launches.TILES.walk(x).splits, thin.shape[-1]
    sums = x.new_empty((len(thin), 2, splits, 3 * channels, R), dtype=torch.float32)
    return x_gradient, sums, torch.empty_like(statistics)


def _backward_launches(
    gradient: Tensor,
    x: Tensor,
    adds: bool,
    between: Tensor,
    epsilon: float,
    results: Any,  # written; None where kernels are only built
    *kept: Tensor,  # thin tensors, packed factors, statistics, coefficients
) -> list[Launch]:
    x_gradient, sums, of_norms = results or _empty_gradients(x, *kept)
    launches, of_result = [], gradient
    for number, source in reversed(list(enumerate((x, *_images(between))))):
        target = torch.empty_like(x_gradient) if number else x_gradient
        residual = of_result if adds and not number else None
        written = (target, *sums[number], of_norms[number])
        own = [tensor[number] for tensor in kept]
        launches += backward_launches(gradient, source, own, epsilon, residual, written)
        gradient = target
    return launches


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, _, shortcut, parameters, ctx.epsilon = inputs
    ctx.adds, ctx.ranks = shortcut is None, [U.shape[1] for U in parameters[2::4]]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *output[2:])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    x, between, *kept = ctx.saved_tensors
    x_gradient, sums, of_norms = _convolutions_backward(gradient, x, ctx.adds, between, kept, ctx.epsilon)
    of_factors = sums.sum(2)  # (layer, factor, channels·3, R)
    found: list[Tensor] = []
    for number, rank in enumerate(ctx.ranks):
        of_U, of_V = of_factors[number, :, :, :rank].unbind()
        of_beta, of_gamma = of_norms[number].unbind()
        found += [of_gamma, of_beta, of_U, of_V]
    return x_gradient, None, None, None if ctx.adds else gradient, found, None


_convolutions.register_autograd(_backward, setup_context=_remember)


class FusedStage(nn.Sequential):
    """A stage of a WideResNet: all but its first convolution by the kernels, where they apply while it is trained."""

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width)
    ) -> Tensor:
        """Run the blocks."""
        blocks: list[Any] = list(self)
        first, layers = blocks[0], layers_of(blocks)
        if not kernels_apply(x, layers):
            return super().forward(x)  # type: ignore[no-untyped-call]
        y = F.relu(first.bn1(x))
        shortcut = x if first.shortcut is None else first.shortcut(y)
        y = first.conv1(y).to(computing_type(x)).contiguous(memory_format=torch.channels_last)
        positions = y.numel() // y.shape[1]
        variance, mean = torch.var_mean(y.detach().float(), dim=(0, 2, 3), correction=0)
        known = torch.stack([mean, variance * positions])[None], positions
        y, known = _run(y, known, shortcut.to(y.dtype).contiguous(memory_format=torch.channels_last), layers[:1])
        for place in range(1, len(layers), 2):
            y, known = _run(y, known, None, layers[place : place + 2])
        return y


def layers_of(blocks: Sequence[WideBlock]) -> list[Layer]:
    """Return norms and convolutions one after another, without those of the first block's beginning."""
    pairs: list[Any] = [pair for block in blocks for pair in ((block.bn1, block.conv1), (block.bn2, block.conv2))]
    return pairs[1:]


def kernels_apply(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Return whether the kernels can run layers on the device of their input."""
    return x.is_cuda and kernels_suit(x, layers) and can_build_kernels(x.device)


def kernels_suit(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Return whether layers are ones for the kernels, on whatever device: plain ones, trained in half precision."""
    return (
        type(x) in PLAIN
        and x.dim() == 4
        and all(is_known(extent > 0) for extent in x.shape)
        and is_known(x.shape[0] * x.shape[2] * x.shape[3] * layers[0][0].num_features < 2**31)
        and is_known(x.shape[3] <= fused_launches.TILES.positions)  # a row of an image is in one tile
        and computing_type(x) in DTYPES
        and torch.is_autocast_enabled(x.device.type)  # so that factors and norms may be float32
        and all(_is_plain_norm(norm) and norm.eps == layers[0][0].eps for norm, _ in layers)
        and all(_is_plain_convolution(conv) for _, conv in layers)
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
        and conv.in_channels == conv.out_channels
        and conv.bias is None
        and conv.adjust is None
        and conv.execution in ("auto", "products")
        and isinstance(conv.format, Product)
        and not conv.format.depth
        and conv.format.shape.row_dims == 1
        and conv.format.shape.groups == 1
        and conv.format.rank <= LARGEST_RANK
        and all(type(factor) in PLAIN for factor in conv.factors)
        and not has_hooks(conv)
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether anything else is to run when the module is called, which a kernel in its place would skip."""
    return any(getattr(module, hooks) for hooks in HOOKS)


def _run(
    x: Tensor,
    known: tuple[Tensor, int],  # parts of the statistics of x, and of how many positions each is
    shortcut: Tensor | None,
    layers: Sequence[Layer],
) -> tuple[Tensor, tuple[Tensor, int]]:
    """Apply layers of norm, ReLU and convolution, and add the shortcut; return the same of the result."""
    parameters = [tensor for norm, conv in layers for tensor in (norm.weight, norm.bias, *conv.factors)]
    y, parts, _, _, _, found, _ = _convolutions(x, *known, shortcut, parameters, layers[0][0].eps)
    positions = x.numel() // x.shape[1]
    for (norm, _), (mean, variance) in zip(layers, found.detach().unbind(), strict=True):
        _follow(norm, mean, variance * (positions / max(positions - 1, 1)))
    return y, (parts, fused_launches.TILES.walk(y).span)


def _follow(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """Let the running statistics of a norm follow those of a batch, as its own forward pass does."""
    norm.running_mean.lerp_(mean, norm.momentum)
    norm.running_var.lerp_(variance, norm.momentum)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)


def fuse(network: WideResNet) -> WideResNet:
    """Let the kernels run the stages of a network, in place; return it."""
    network.stages = nn.Sequential(*(FusedStage(*stage) for stage in network.stages))  # type: ignore[misc]
    return network
