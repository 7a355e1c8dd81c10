"""Expanding a Tucker tensor so that nothing but its cores is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from factorized.maths.tensor_format import TensorFormat
from factorized.maths.tucker import TuckerFormat, tucker_expand, unfold

SLICES = 8  # in which the backward pass goes through the tensor


def expand_for_training(
    tensor: TensorFormat,
    cores: Sequence[Tensor],
) -> Tensor:  # (*dims)
    """Return the tensor, differentiable, with at most its own size kept on the way to it.

    Left to autograd, every mode product is kept for the backward pass, and near full rank each is as large as the
    result. There the cores alone are kept, at the price of more products in the backward pass.
    """
    if tensor.keeps_little or not isinstance(tensor, TuckerFormat):
        return tensor.expand(cores)
    core, factors = tensor.parts(cores)
    present = [factor for factor in factors if factor is not None]
    expanded: Tensor = _LightExpansion.apply(core, tensor.order, *present)  # type: ignore[no-untyped-call]
    return expanded


def light_gradients(
    core: Tensor,  # (R₁, …, R_m, *kept)
    factors: Sequence[Tensor],  # each (d_k, R_k)
    at: Tensor,  # (d₁, …, d_m, *kept)
) -> tuple[Tensor, list[Tensor]]:  # like core, like factors
    """Return the gradients of ⟨``at``, the expanded tensor⟩, a slice of the first mode after the other."""
    first, *others = factors
    matrix = core.flatten(1)  # (R₁, all others)
    of_core, of_others = torch.zeros_like(matrix), [torch.zeros_like(factor) for factor in others]
    of_first = []
    kept, count = [None] * (core.dim() - len(factors)), core.dim()
    for rows, part in zip(first.chunk(SLICES), at.chunk(SLICES), strict=True):
        inside = (rows @ matrix).unflatten(1, core.shape[1:])  # the core of this slice
        for k, of_other in enumerate(of_others):
            projections = [None if place == k else factor.mT for place, factor in enumerate(others)]
            seen = tucker_expand(part, [None, *projections, *kept])
            of_other.addmm_(unfold(seen, k + 1, count), unfold(inside, k + 1, count).mT)
        of_inside = tucker_expand(part, [None, *[factor.mT for factor in others], *kept]).flatten(1)
        of_first.append(of_inside @ matrix.mT)
        of_core.addmm_(rows.mT, of_inside)
    return of_core.reshape(core.shape), [torch.cat(of_first), *of_others]


class _LightExpansion(torch.autograd.Function):
    @staticmethod
    def forward(core: Tensor, order: tuple[int, ...], *factors: Tensor) -> Tensor:
        kept = core.dim() - len(factors)
        return tucker_expand(core, [*factors, *[None] * kept], order)

    @staticmethod
    def setup_context(
        ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, tuple[int, ...], Tensor], output: Tensor
    ) -> None:
        core, _, *factors = inputs
        ctx.save_for_backward(core, *factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        core, *factors = ctx.saved_tensors  # type: ignore[attr-defined]
        dtype = factors[0].dtype  # under autocast the core of a train and the gradient are of a lower type
        of_core, of_factors = light_gradients(core.to(dtype), factors, gradient.to(dtype))
        return of_core.to(core.dtype), None, *of_factors
