"""Low-rank 3×3 convolutions that apply batch normalization and ReLU to their input while they read it, on a GPU.

A stage of a WideResNet reads and writes its activations about half as often as what the compiler makes of it:
statistics are taken where a tensor is written, it is normalized where it is read, and the gradient of a normalized
input is computed twice from the thin gradient in place of being stored. One operator runs the convolutions of a block
forward (``kernels.py``), another one backward (``gradient_kernels.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.experiments.models.normalized import launches, tiles
from factorized.experiments.models.normalized.statistics import Parts, followed
from factorized.formats.convolution import Geometry, convolve
from factorized.formats.kernel import KernelShape, to_kernel
from factorized.formats.launches import Launch, builder, run_all

SAME = Geometry((1, 1), ((1, 1), (1, 1)), (1, 1))  # of a 3×3 kernel: outputs are as large as inputs
Layer = tuple[nn.BatchNorm2d, Any]  # and a convolution, factorized where the kernels run it


def normalized_convolutions(
    x: Tensor,  # (batch, channels, height, width), channels-last
    known: Parts,  # of x
    shortcut: Tensor | None,  # added to the last result; may be x
    layers: Sequence[Layer],
) -> tuple[Tensor, Parts]:
    """Apply norm, ReLU and convolution of every layer, add the shortcut; return the result and its statistics."""
    adds_x = shortcut is x
    if adds_x:
        shortcut = None
    elif shortcut is not None:
        shortcut = shortcut.to(x.dtype).contiguous(memory_format=torch.channels_last)
    positions, (first, _) = x.numel() // x.shape[1], layers[0]
    parameters = [tensor for norm, conv in layers for tensor in (norm.weight, norm.bias, *conv.factors)]
    first_found = followed(first, known, positions)
    y, parts, _, _, _, found, _ = _convolutions(x, *first_found, adds_x, shortcut, parameters, first.eps)
    for (norm, _), (mean, variance) in zip(layers[1:], found.detach().unbind(), strict=True):
        _follow(norm, mean, variance * (positions / max(positions - 1, 1)))
    return y, Parts(parts.detach(), tiles.TILES.walk(y).span)


def _follow(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """Let the running statistics of a norm follow those of a batch, as its own forward pass does."""
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), norm.momentum)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)


@torch.library.custom_op(
    "factorized::normalized_convolutions",
    mutates_args=(),
    schema="(Tensor x, Tensor statistics, Tensor coefficients, bool adds_x, Tensor? shortcut, Tensor[] parameters, "
    "float epsilon) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _convolutions(
    x: Tensor,  # (batch, channels, height, width), channels-last
    statistics: Tensor,  # (2, channels): mean and variance of x
    coefficients: Tensor,  # (2, channels): what the first norm makes of them
    adds_x: bool,  # to the last result
    shortcut: Tensor | None,  # added to it, too
    parameters: Sequence[Tensor],  # gamma, beta, U, V of one convolution after another
    epsilon: float,
) -> Any:
    """Return the result, parts of its statistics, and what the backward pass needs of each layer.

    These are the inputs, statistics and coefficients of all layers but the first, thin tensors and packed factors.
    """
    results = _empty_results(x, parameters)
    run_all(_forward_launches(x, statistics, coefficients, adds_x, shortcut, epsilon, results, *parameters), x.device)
    return results


@_convolutions.register_fake
def _traced_results(
    x: Tensor,
    statistics: Tensor,
    coefficients: Tensor,
    adds_x: bool,
    shortcut: Tensor | None,
    parameters: Sequence[Tensor],
    epsilon: float,
) -> Any:
    if x.is_cuda:
        given = (x, statistics, coefficients, adds_x, shortcut, epsilon, None, *parameters)
        builder.ask(_forward_launches, x.device, *given)
    return _empty_results(x, parameters)


def _empty_results(x: Tensor, parameters: Sequence[Tensor]) -> Any:
    batch, channels, height, width = x.shape
    layers = len(parameters) // 4
    R = max(16, 1 << (max(U.shape[1] for U in parameters[2::4]) - 1).bit_length())
    norms = x.new_empty((layers - 1, 2, channels), dtype=torch.float32)
    return (
        x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2),
        x.new_empty((tiles.TILES.walk(x).splits, 2, channels), dtype=torch.float32),
        x.new_empty((layers - 1, batch, height, width, channels)),
        x.new_empty((layers, batch, height, width, R)),
        x.new_empty((layers, 6 * channels, R)),
        norms,
        torch.empty_like(norms),
    )


def _forward_launches(
    x: Tensor,
    statistics: Tensor,
    coefficients: Tensor,
    adds_x: bool,
    shortcut: Tensor | None,
    epsilon: float,
    results: Any,  # written; None where kernels are only built
    *parameters: Tensor,
) -> list[Launch]:
    y, y_parts, between, thin, packed, *own = results or _empty_results(x, parameters)
    found, parts = list[Launch](), y_parts
    for number, (source, target) in enumerate(pairwise((x, *_images(between), y))):
        gamma, beta, U, V = parameters[4 * number : 4 * number + 4]
        if number:
            statistics, coefficients = (tensor[number - 1] for tensor in own)
            known, positions = (parts, tiles.TILES.walk(source).span), x.numel() // x.shape[1]
            norm = (gamma, beta, epsilon)
            found.append(launches.joining(known, positions, norm, None, (statistics, coefficients)))
        parts = y_parts if target is y else torch.empty_like(y_parts)
        residual = (x if adds_x else shortcut) if target is y else None
        written = (target, parts, thin[number], packed[number])
        found += launches.forward_launches(source, coefficients, (U, V), residual, written)
    return found


def _images(stacked: Tensor) -> list[Tensor]:  # (number, batch, height, width, channels)
    return [tensor.permute(0, 3, 1, 2) for tensor in stacked.unbind()]


@torch.library.custom_op(
    "factorized::normalized_convolutions_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, bool adds_x, Tensor between, Tensor[] kept, float epsilon) "
    "-> (Tensor, Tensor, Tensor)",
)
def _convolutions_backward(
    gradient: Tensor, x: Tensor, adds_x: bool, between: Tensor, kept: Sequence[Tensor], epsilon: float
) -> Any:
    """Return the gradients of x, of the factors of every layer in parts, and of beta and gamma of each.

    ``adds_x`` says that x is added to the result, so that its gradient gets that of the result as well.
    """
    results = _empty_gradients(x, *kept)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    run_all(_backward_launches(gradient, x, adds_x, between, epsilon, results, *kept), x.device)
    return results


@_convolutions_backward.register_fake
def _traced_gradients(
    gradient: Tensor, x: Tensor, adds_x: bool, between: Tensor, kept: Sequence[Tensor], epsilon: float
) -> Any:
    if x.is_cuda:
        builder.ask(_backward_launches, x.device, gradient, x, adds_x, between, epsilon, None, *kept)
    return _empty_gradients(x, *kept)


def _empty_gradients(x: Tensor, thin: Tensor, packed: Tensor, *of_norms: Tensor) -> Any:
    batch, channels, height, width = x.shape
    x_gradient = x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)
    splits, R = tiles.TILES.walk(x, thin.shape[-1]).splits, thin.shape[-1]
    sums = x.new_empty((len(thin), 2, splits, 3 * channels, R), dtype=torch.float32)
    return x_gradient, sums, x.new_empty((len(thin), 2, channels), dtype=torch.float32)


def _backward_launches(
    gradient: Tensor,
    x: Tensor,
    adds_x: bool,
    between: Tensor,
    epsilon: float,
    results: Any,  # written; None where kernels are only built
    *kept: Tensor,  # thin tensors, packed factors; statistics and coefficients of the first norm, and of the others
) -> list[Launch]:
    x_gradient, sums, of_norms = results or _empty_gradients(x, *kept)
    thin, packed, *first, statistics, coefficients = kept
    norms = [first, *zip(statistics, coefficients, strict=True)]
    found, of_result = list[Launch](), gradient
    for number, source in reversed(list(enumerate((x, *_images(between))))):
        target = torch.empty_like(x_gradient) if number else x_gradient
        residual = of_result if adds_x and not number else None
        written = (target, *sums[number], of_norms[number])
        own = (thin[number], packed[number], *norms[number])
        found += launches.backward_launches(gradient, source, own, epsilon, residual, written)
        gradient = target
    return found


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *first, ctx.adds_x, shortcut, parameters, ctx.epsilon = inputs
    _, _, between, thin, packed, *others = output
    ctx.has_shortcut = shortcut is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, between, thin, packed, *first, *others, *parameters)


def _backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    x, between, *saved = ctx.saved_tensors
    kept, parameters = saved[:6], saved[6:]
    of_shortcut = gradient if ctx.has_shortcut else None
    if torch.is_grad_enabled():  # gradients of gradients, which the kernels do not have
        of_x, *found = _composed_gradients(x, parameters, gradient, ctx)
        return of_x, None, None, None, of_shortcut, found, None
    of_x, sums, of_norms = _convolutions_backward(gradient, x, ctx.adds_x, between, kept, ctx.epsilon)
    found = []
    for own, of_norm, U in zip(sums.unbind(), of_norms.unbind(), parameters[2::4], strict=True):
        of_U, of_V = own[..., : U.shape[1]].sum(1).unbind()  # cut first: gradients that are views would be copied
        of_beta, of_gamma = of_norm.unbind()
        found += [of_gamma, of_beta, of_U, of_V]
    return of_x, None, None, None, of_shortcut, found, None


def _composed_gradients(x: Tensor, parameters: Sequence[Tensor], gradient: Tensor, ctx: Any) -> list[Tensor | None]:
    """Return the gradients that are needed, by operations that can be differentiated again."""
    y, shape = x, KernelShape.of((x.shape[1], x.shape[1], 3, 3))
    for gamma, beta, U, V in zip(*[iter(parameters)] * 4, strict=True):
        y = F.batch_norm(y.float(), None, None, gamma.float(), beta.float(), training=True, eps=ctx.epsilon)
        kernel = to_kernel((U @ V.mT)[None], shape).to(x.dtype)
        y = convolve(F.relu(y).to(x.dtype), kernel, None, SAME, groups=1)
    y = y + x if ctx.adds_x else y
    everything = (x, *parameters)
    needed = [tensor for tensor in everything if tensor.requires_grad]
    found = iter(torch.autograd.grad(y, needed, gradient, create_graph=True))
    return [next(found) if tensor.requires_grad else None for tensor in everything]


_convolutions.register_autograd(_backward, setup_context=_remember)
