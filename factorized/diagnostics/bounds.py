"""``fz.margin_bounds``: the two generalization terms of the paper's appendix A."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from factorized._checks import is_number
from factorized._torch import computable, full_precision
from factorized.attention.family import is_transposed
from factorized.attention.heads import AroundHeads
from factorized.formats.kernel import KernelShape, to_matrix
from factorized.nn.held_weight import HeldWeight, named_layers
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import check_model
from factorized.nn.running import evaluation_mode, move_to

_WEIGHTED = (nn.Linear, _ConvNd, nn.MultiheadAttention, HeldWeight, AroundHeads)


@dataclass(frozen=True)
class MarginBounds:
    """The terms that corollaries A.1 and A.2 add to the margin loss, up to a constant, and their ingredients.

    Both are products over layers and can be astronomically large: compare them between models, as logarithms.

    Attributes:
        samples: |S|, the number of samples.
        radius: B, the largest norm of an input.
        gamma: γ, the margin.
        margin_loss: the share of samples with a margin of at most γ.
        layers: L, the number of layers.
        width: m, the largest number of rows of a weight.
        rank: r, the largest rank.
        log10_rank_term: the logarithm of √(B² L³ m r log(Lm) Π‖W‖²₂ / γ²|S|).
        log10_frobenius_term: the logarithm of √(B² L² m log(Lm) Σᵢ‖Wᵢ‖²_F Πⱼ≠ᵢ‖Wⱼ‖²₂ / γ²|S|).

    Examples:
        >>> batch = torch.randn(16, 8), torch.randint(2, (16,))
        >>> wide = fz.margin_bounds(nn.Linear(8, 2), [batch], gamma=0.1)
        >>> thin = fz.margin_bounds(nn.Sequential(fz.FactorizedLinear(8, 2, 1)), [batch], gamma=0.1)
        >>> wide.rank, thin.rank
        (2, 1)
    """

    samples: int
    radius: float
    gamma: float
    margin_loss: float
    layers: int
    width: int
    rank: int
    log10_rank_term: float
    log10_frobenius_term: float


@torch.no_grad()
def margin_bounds(
    model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], *, gamma: float | None = None, delta: float = 0.05
) -> MarginBounds:
    """Return the generalization terms of ``model`` on a loader of (inputs, classes).

    Linear layers, convolutions, projections of attention, gates and experts count, as the matrices that they would be
    factorized as. Embeddings do not count. The appendix bounds ‖W‖₂ by one σ for all layers; here
    each layer's own norm is used, which is the same theorem and sharper. (As printed, corollary A.1 has both σ²ᴸ and
    the product of the norms; the theorem that it applies has only the product.)

    Args:
        model: returns scores (samples, classes).
        loader: gives batches of floating-point inputs and whole-number classes.
        gamma: the margin at which the loss is taken; by default a tenth of the samples have a smaller one.
        delta: the probability with which the bounds may fail.

    Raises:
        ValueError: the model has no layer to bound, the loader is empty or gives anything else, scores are not finite,
            or a tenth of the samples are misclassified and ``gamma`` is not given.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batch = torch.randn(16, 8), torch.randint(2, (16,))
        >>> bounds = fz.margin_bounds(model, [batch], gamma=0.1)
        >>> bounds.samples, bounds.layers
        (16, 2)
    """
    check_model(model)
    if gamma is not None and not (is_number(gamma) and gamma > 0):
        raise ValueError(f"the margin gamma must be a finite number above 0, got {gamma!r}")
    if not (is_number(delta) and 0 < delta < 1):
        raise ValueError(f"delta must be a probability between 0 and 1, got {delta!r}")
    weighted = [module for module in dict.fromkeys(named_layers(model).values()) if _is_weighted(module)]
    if not weighted:
        raise ValueError(f"{type(model).__name__} has no linear or convolutional layer to bound")
    margins, radius = _margins(model, loader)  # raises if the weights are not finite, and so neither are the scores
    spectra = [spectrum for module in weighted for spectrum in _spectra(module)]
    if gamma is None:
        gamma = torch.quantile(margins, 0.1).item()
        if not gamma > 0:
            raise ValueError(
                f"a tenth of the samples have a margin of {gamma:.3g} or less, but gamma must be above 0: the model "
                "misclassifies them. Pass gamma="
            )
    layers, width = len(spectra), max(rows for rows, _, _ in spectra)
    rank = max(rank for _, rank, _ in spectra)
    if radius == 0 or any(values.max() == 0 for _, _, values in spectra):
        raise ValueError(
            "the bounds need inputs and weights that are not zero; all inputs, or the weight of a layer, are zero"
        )
    log_norms = [2 * math.log(values.max().item()) for _, _, values in spectra]
    stable = sum((values.square().sum() / values.max() ** 2).item() for _, _, values in spectra)
    common = 2 * math.log(radius) + math.log(width * math.log(layers * width)) + sum(log_norms)
    extra = math.log(layers * len(margins) / delta)
    scale = 2 * math.log(gamma) + math.log(len(margins))
    return MarginBounds(
        samples=len(margins),
        radius=radius,
        gamma=gamma,
        margin_loss=(margins <= gamma).float().mean().item(),
        layers=layers,
        width=width,
        rank=rank,
        log10_rank_term=_half_log10(common + 3 * math.log(layers) + math.log(rank), extra, scale),
        log10_frobenius_term=_half_log10(common + 2 * math.log(layers) + math.log(stable), extra, scale),
    )


def _half_log10(log_main: float, extra: float, log_scale: float) -> float:
    """Return log10 √((e^main + extra) / e^scale)."""
    high, low = max(log_main, math.log(extra)), min(log_main, math.log(extra))
    return (high + math.log1p(math.exp(low - high)) - log_scale) / 2 / math.log(10)


def _margins(model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, float]:
    found, radius = [], 0.0
    with evaluation_mode(model):
        for batch in loader:
            inputs, classes = move_to(model, _pair_of(batch))
            _check_samples(inputs, classes)
            classes = classes.long()
            scores = _scores_of(model(inputs), classes)
            right = scores.gather(1, classes[:, None]).squeeze(1)
            others = scores.scatter(1, classes[:, None], -torch.inf).amax(dim=1)
            found.append((right - others).cpu())
            radius = max(radius, computable(inputs).flatten(1).norm(dim=1).max().item())
    if not found:
        raise ValueError("the loader is empty; margins need samples")
    return torch.cat(found), radius


def _pair_of(batch: object) -> tuple[Tensor, Tensor]:
    parts = list(batch) if isinstance(batch, (tuple, list)) else []
    if len(parts) == 2 and all(isinstance(part, Tensor) for part in parts):
        return parts[0], parts[1]
    got = f"{type(batch).__name__} of {len(parts)}" if parts else type(batch).__name__
    raise ValueError(f"the loader must give pairs (inputs, classes) of tensors, got {got}")


def _check_samples(inputs: Tensor, classes: Tensor) -> None:
    if not inputs.is_floating_point():
        raise ValueError(
            f"the loader must give inputs of a floating type, whose norm enters the bounds, got {inputs.dtype}"
        )
    if classes.is_floating_point() or classes.dtype == torch.bool:
        raise ValueError(f"the loader must give classes as whole numbers, got {classes.dtype}")


def _scores_of(output: object, classes: Tensor) -> Tensor:  # (samples, classes)
    if not isinstance(output, Tensor):
        got = type(output).__name__
        raise ValueError(
            f"the model must return scores (samples, classes) as a tensor, got {got}; wrap it in a module that does"
        )
    scores = output.float()
    if scores.dim() != 2 or scores.shape[1] < 2:
        raise ValueError(f"the model must return scores (samples, two classes or more), got {tuple(scores.shape)}")
    if not torch.isfinite(scores).all():
        raise ValueError(
            "the model's scores hold NaN or infinity, so they have no margins; check the model and its inputs"
        )
    if classes.shape != scores.shape[:1] or classes.min() < 0 or classes.max() >= scores.shape[1]:
        raise ValueError(
            f"the loader must give one class in 0..{scores.shape[1] - 1} per sample, got {tuple(classes.shape)} of "
            f"{classes.min().item()}..{classes.max().item()} for {scores.shape[0]} samples"
        )
    return scores


def _is_weighted(module: nn.Module) -> bool:
    if isinstance(module, FactorizedLayer):
        return module.form_kind != "embedding"
    return isinstance(module, _WEIGHTED) or is_transposed(module)


@full_precision
def _spectra(module: nn.Module) -> list[tuple[int, int, Tensor]]:
    """Return rows, rank and singular values of each matrix of a layer; groups count as one block-diagonal matrix."""
    if isinstance(module, FactorizedLayer):
        shape, rank = module.shape, module.format.matrix_rank
        values = module.format.spectrum([computable(factor) for factor in module.factors])
        return [(shape.groups * shape.rows, shape.groups * rank, values.flatten())]
    found = []
    for weight, groups in _weights(module):
        shape = KernelShape.of(tuple(weight.shape), groups)
        values = torch.linalg.svdvals(computable(to_matrix(weight, shape)))
        found.append((shape.groups * shape.rows, shape.groups * shape.full_rank, values.flatten()))
    return found


def _weights(module: Any) -> list[tuple[Tensor, int]]:
    """Return the weights of a dense layer, each with its number of groups."""
    if isinstance(module, nn.MultiheadAttention):  # its output projection is a layer
        if module.in_proj_weight is not None:
            return [(weight, 1) for weight in module.in_proj_weight.chunk(3)]
        return [(weight, 1) for weight in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)]
    if isinstance(module, HeldWeight):
        return [(module.weight.reshape(module.matrix_shape), module.groups)]
    groups = module.groups if isinstance(module, _ConvNd) else 1
    return [(module.weight.mT if is_transposed(module) else module.weight, groups)]
