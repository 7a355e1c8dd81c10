"""LAMB as section 1 of REFERENCE.md writes it, one parameter after the other, to compare the optimizers with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    bias_correction: bool = True
    trust_clip: float | None = None


Decay = Callable[[list[Tensor], Settings], list[Tensor]]


def plain_decay(weights: list[Tensor], settings: Settings) -> list[Tensor]:
    return [settings.weight_decay * weight for weight in weights]


def lamb(
    weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], settings: Settings, decay: Decay = plain_decay
) -> list[Tensor]:
    """Return the weights after one step per entry of ``gradients``; ``decay`` sees all weights before any moves."""
    weights = [weight.detach().clone() for weight in weights]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    beta1, beta2 = settings.betas
    for t, step_gradients in enumerate(gradients, start=1):
        norm = sum(gradient.square().sum().item() for gradient in step_gradients) ** 0.5
        cut = 1.0 if settings.max_grad_norm is None else min(1.0, settings.max_grad_norm / norm)
        decays = decay(weights, settings)
        for i, gradient in enumerate(step_gradients):
            first[i] = beta1 * first[i] + (1 - beta1) * cut * gradient
            second[i] = beta2 * second[i] + (1 - beta2) * (cut * gradient) ** 2
            m, v = first[i], second[i]
            if settings.bias_correction:
                m, v = m / (1 - beta1**t), v / (1 - beta2**t)
            u = m / (v.sqrt() + settings.eps) + decays[i]
            ratio = weights[i].norm().item() / u.norm().item()
            if settings.trust_clip is not None:
                ratio = min(ratio, settings.trust_clip)
            weights[i] = weights[i] - settings.lr * ratio * u
    return weights


def draws(shapes: Sequence[Sequence[int]], count: int, seed: int = 0) -> list[list[Tensor]]:
    """Return ``count`` sets of random tensors in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(tuple(shape), dtype=torch.float64, generator=generator) for shape in shapes] for _ in range(count)
    ]


def run(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], gradients: Sequence[Sequence[Tensor]]
) -> None:
    """Step once per entry of ``gradients``."""
    for step_gradients in gradients:
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype).clone()
        optimizer.step()
