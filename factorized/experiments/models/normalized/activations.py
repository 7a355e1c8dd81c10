"""Batch normalization, the sum with a shortcut, and ReLU as one operator on a GPU.

The compiler makes about ten kernels of these, forward and backward, and takes half of its time for them. Here they are
six, written once for all layers: statistics in parts, joining these, the result; back the gradients of scale and shift
in parts, joining these, the gradient of the input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from factorized.experiments.models.normalized import launches
from factorized.experiments.models.normalized.statistics import Statistics
from factorized.formats.launches import builder, run_all


def normalized_activation(
    x: Tensor,  # (batch, channels, height, width), channels-last
    gamma: Tensor,
    beta: Tensor,
    found: Statistics,  # of x
    shortcut: Tensor | None,  # like x
    epsilon: float,
    twice: bool = False,
) -> Tensor:  # like x
    """Return relu(gamma (x - mean) / deviation + beta + shortcut); gradients know that x moves its statistics.

    With ``twice``, compiled code computes the result again for the backward pass, in place of keeping it beside ``x``.
    """
    if shortcut is not None:
        shortcut = shortcut.to(x.dtype).contiguous(memory_format=torch.channels_last)
    given = (x, gamma, beta, *found, shortcut, epsilon)
    if twice and torch.compiler.is_compiling():  # in eager mode, what reads the result would keep it
        y: Tensor = checkpoint(_activate, *given, use_reentrant=False)
    else:
        y = _activate(*given)
    return y


@torch.library.custom_op(
    "factorized::normalized_activation",
    mutates_args=(),
    schema="(Tensor x, Tensor gamma, Tensor beta, Tensor statistics, Tensor coefficients, Tensor? shortcut, "
    "float epsilon) -> Tensor",
)
def _activate(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    statistics: Tensor,
    coefficients: Tensor,
    shortcut: Tensor | None,
    epsilon: float,
) -> Tensor:
    y = _like(x)
    run_all(launches.activation_launches(x, coefficients, shortcut, y), x.device)
    return y


@_activate.register_fake
def _traced_result(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    statistics: Tensor,
    coefficients: Tensor,
    shortcut: Tensor | None,
    epsilon: float,
) -> Tensor:
    y = _like(x)
    if x.is_cuda:
        builder.ask(launches.activation_launches, x.device, x, coefficients, shortcut, y)
    return y


def _like(x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    return x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)


@torch.library.custom_op(
    "factorized::normalized_activation_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor? y, Tensor statistics, Tensor coefficients, float epsilon) "
    "-> (Tensor, Tensor, Tensor)",
)
def _activate_backward(
    gradient: Tensor, x: Tensor, y: Tensor | None, statistics: Tensor, coefficients: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the shortcut (empty without ``y``, the result with one), of beta and gamma."""
    results = _empty_gradients(x, y, statistics)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    run_all(
        launches.activation_gradient_launches(gradient, x, y, statistics, coefficients, epsilon, *results), x.device
    )
    return results


@_activate_backward.register_fake
def _traced_gradients(
    gradient: Tensor, x: Tensor, y: Tensor | None, statistics: Tensor, coefficients: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    results = _empty_gradients(x, y, statistics)
    if x.is_cuda:
        builder.ask(
            launches.activation_gradient_launches, x.device, gradient, x, y, statistics, coefficients, epsilon, *results
        )
    return results


def _empty_gradients(x: Tensor, y: Tensor | None, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), x.new_empty(0) if y is None else _like(x), torch.empty_like(statistics)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gamma, beta, statistics, coefficients, shortcut, ctx.epsilon = inputs
    ctx.save_for_backward(x, gamma, beta, statistics, coefficients, shortcut, None if shortcut is None else output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, gamma, beta, statistics, coefficients, shortcut, y = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients, which the kernels do not have
        return _composed_gradients(x, gamma, beta, shortcut, gradient, ctx.epsilon)
    of_x, passed, of_norm = _activate_backward(gradient, x, y, statistics, coefficients, ctx.epsilon)
    of_beta, of_gamma = of_norm.unbind()
    return of_x, of_gamma, of_beta, None, None, None if shortcut is None else passed, None


def _composed_gradients(
    x: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None, gradient: Tensor, epsilon: float
) -> tuple[Tensor | None, ...]:
    """Return the gradients by operations that can be differentiated again."""
    if shortcut is not None:
        shortcut = shortcut.view_as(shortcut)  # x may depend on it, too
    y = F.batch_norm(x.float(), None, None, gamma.float(), beta.float(), training=True, eps=epsilon)
    y = F.relu(y if shortcut is None else y + shortcut).to(x.dtype)
    needed = [tensor for tensor in (x, gamma, beta, shortcut) if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(y, needed, gradient, create_graph=True))

    def of(tensor: Tensor | None) -> Tensor | None:
        return next(found) if tensor is not None and tensor.requires_grad else None

    return of(x), of(gamma), of(beta), None, None, of(shortcut), None


_activate.register_autograd(_backward, setup_context=_remember)
