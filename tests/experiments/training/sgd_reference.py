"""Stochastic gradient descent written out in float64, with every kind of decay; shares no code with the loop."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.experiments.data.images import Images
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.source import epoch_order
from factorized.nn.layer import FactorizedLayer


def train_by_hand(network: nn.Module, recipe: Recipe, images: Images, seed: int, steps: int) -> nn.Module:
    """Return a float64 copy of ``network`` after the first ``steps`` steps, without crops and flips."""
    network = deepcopy(network).double().train()
    order = epoch_order(len(images.y_train), seed, 0)
    momentum = {name: torch.zeros_like(parameter) for name, parameter in network.named_parameters()}
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (images.mean, images.std))
    fields = recipe.optimizer
    for step in range(steps):
        rows = order[step * recipe.run.batch : (step + 1) * recipe.run.batch]
        logits = network((images.x_train[rows].double() / 255 - mean) / std)
        loss = _smoothed_loss(logits, images.y_train[rows], recipe.run.label_smoothing)
        names, parameters = zip(*network.named_parameters(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        if fields.clip is not None:
            norm = torch.sqrt(sum((g.square().sum() for g in gradients.values()), torch.zeros(())))
            gradients = {name: g * min(1.0, fields.clip / norm.item()) for name, g in gradients.items()}
        decays = _decays(network, recipe)
        lr = recipe.schedule.learning_rate(fields.lr, 0)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                gradient = gradients[name] + decays[name]
                momentum[name] = fields.momentum * momentum[name] + gradient
                moved = gradient + fields.momentum * momentum[name] if fields.nesterov else momentum[name]
                parameter -= lr * moved
    return network


def _smoothed_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    classes = logits.shape[1]
    target = F.one_hot(labels, classes).double() * (1 - smoothing) + smoothing / classes
    return -(target * logits.log_softmax(1)).sum(1).mean()


def _decays(network: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    kind, strength = recipe.decay.kind, recipe.decay.strength
    rest = recipe.decay.rest if recipe.decay.rest is not None else strength
    decays = {}
    for name, parameter in network.named_parameters():
        owner = network.get_submodule(name.rpartition(".")[0].removesuffix(".inner"))
        value = parameter.detach()
        if not isinstance(owner, FactorizedLayer) or name.endswith(".bias"):
            share = rest if kind in ("weight", "frobenius", "crs") or recipe.decay.rest is not None else 0.0
            decays[name] = share * value
        elif kind == "weight":
            decays[name] = strength * value
        elif kind == "crs":
            weight = owner.weight.numel()
            decays[name] = strength * sum(factor.numel() for factor in owner.factors) / weight * value
        elif kind == "frobenius":
            penalty = strength / 2 * owner.weight.square().sum()
            decays[name] = torch.autograd.grad(penalty, parameter)[0]
        else:
            decays[name] = torch.zeros_like(value)
    return decays
