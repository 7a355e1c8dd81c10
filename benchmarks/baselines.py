"""What others do to compress a trained layer, as small as it can be written: for comparison, not for use.

Each gives factors of a matrix W (out, in) that is applied to inputs x, at a rank. Truncated SVD keeps W. ASVD (Yuan et
al., 2023) scales the columns of W by the mean magnitude of their inputs. SVD-LLM (Wang et al., 2024) whitens by the
Cholesky factor of the inputs' second moment. Magnitude pruning keeps the largest entries, as many as the factors have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

import factorized as fz
from factorized.nn.moments import patches

SHARPNESS = 0.5  # ASVD's alpha
RIDGE = 1e-6  # of the mean of the diagonal, so that a Cholesky factor exists


class Inputs:
    """The second moment and the mean magnitude of a layer's inputs, by a hook."""

    def __init__(self) -> None:
        self.moment: Any = 0.0
        self.magnitude: Any = 0.0

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Add the inputs of one call."""
        x = arguments[0]
        x = (patches(x, layer)[0] if isinstance(layer, _ConvNd) else x.reshape(-1, x.shape[-1])).double()
        self.moment, self.magnitude = self.moment + x.mT @ x, self.magnitude + x.abs().sum(0)


def truncated(W: Tensor, inputs: Inputs, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the best approximation of W."""
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    return U[:, :rank] * S[:rank].sqrt(), Vh[:rank].mT * S[:rank].sqrt()


def activation_aware(W: Tensor, inputs: Inputs, rank: int) -> tuple[Tensor, Tensor]:
    """Return ASVD's factors."""
    scale = (inputs.magnitude / inputs.magnitude.mean()).clamp(min=1e-6) ** SHARPNESS
    U, V = truncated(W * scale, inputs, rank)
    return U, V / scale.unsqueeze(-1)


def whitened(W: Tensor, inputs: Inputs, rank: int) -> tuple[Tensor, Tensor]:
    """Return SVD-LLM's factors."""
    C = inputs.moment
    L = torch.linalg.cholesky(C + RIDGE * C.diagonal().mean() * torch.eye(len(C), dtype=C.dtype, device=C.device))
    U, V = truncated(W @ L, inputs, rank)
    return U, torch.linalg.solve_triangular(L.mT, V, upper=True)


METHODS: dict[str, Callable[[Tensor, Inputs, int], tuple[Tensor, Tensor]]] = {
    "truncated SVD": truncated,
    "ASVD": activation_aware,
    "SVD-LLM": whitened,
}


@torch.no_grad()
def factorized_by(method: str, model: nn.Module, plan: fz.Plan, calibration: fz.Calibrated) -> nn.Module:
    """Return ``model``, changed in place, with a baseline's factors at the plan's ranks.

    The plan is one of ``fz.LowRank("channel")`` for linears and convolutions: a kernel is a matrix (out, in·taps).
    """
    layers = {entry.name: model.get_submodule(entry.name) for entry in plan.layers}
    seen = {name: Inputs() for name in layers}
    hooks = [layer.register_forward_pre_hook(seen[name]) for name, layer in layers.items()]
    calibration.run(model)
    for hook in hooks:
        hook.remove()
    weights = {name: layer.get_parameter("weight").detach().double().flatten(1) for name, layer in layers.items()}
    fz.factorize(model, plan, init="default")
    for name, W in weights.items():
        layer: Any = model.get_submodule(name)
        U, V = METHODS[method](W, seen[name], layer.rank)
        layer.set_factors(U.to(layer.U.dtype), V.to(layer.V.dtype))
    return model


@torch.no_grad()
def pruned(model: nn.Module, plan: fz.Plan) -> nn.Module:
    """Return ``model`` with the smallest entries of the plan's layers set to zero; as many remain as its factors have.

    They stay zero in training: they get no gradient, and decay leaves a zero as it is.
    """
    weights = [model.get_submodule(entry.name).get_parameter("weight") for entry in plan.layers]
    kept = sum(entry.params_after for entry in plan.layers)
    every = torch.cat([weight.abs().flatten() for weight in weights])
    least = every.topk(kept).values[-1]
    for weight in weights:
        mask = (weight.abs() >= least).to(weight.dtype)
        weight.mul_(mask)
        weight.register_hook(mask.mul)
    return model
