"""Adding the Frobenius gradients of forms to tensors, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from factorized.decay.batch import batches
from factorized.decay.forms import Factor, Form
from factorized.decay.strength import Number

Target = Callable[[Factor], Tensor | None]  # what a factor's gradient is added to, or None to leave the factor out


class FrobeniusEngine:
    """Computes the Frobenius gradients of some forms, again and again."""

    def __init__(self, found: Sequence[Form]) -> None:
        self.form_of: dict[Factor, Form] = {factor: form for form in found for factor in form.factors}
        self.units = batches(found)

    @torch.no_grad()
    def add(self, target: Target, coefficient: Callable[[Factor], Number]) -> None:
        """Add ``coefficient(factor)`` times every factor's gradient to its ``target``."""
        additions: dict[Number, tuple[list[Tensor], list[Tensor]]] = {}
        for unit in self.units:
            targets = [target(factor) for factor in unit.factors]
            if all(tensor is None for tensor in targets):
                continue
            for factor, tensor, gradient in zip(unit.factors, targets, unit.gradients(), strict=True):
                if tensor is not None:
                    into, parts = additions.setdefault(coefficient(factor), ([], []))
                    into.append(tensor)
                    parts.append(gradient)
        for number, (into, parts) in additions.items():
            if isinstance(number, Tensor):
                torch._foreach_add_(into, torch._foreach_mul(parts, number.to(parts[0].device)))
            elif number != 0:
                torch._foreach_add_(into, parts, alpha=number)


def gradient_of(factor: Factor) -> Tensor | None:
    """Return the factor's part of its parameter's gradient; None where there is none, as for any optimizer."""
    gradient = factor.parameter.grad
    if gradient is None or not factor.parameter.requires_grad:
        return None
    if gradient.is_sparse:
        raise ValueError(
            "a factor has a sparse gradient, to which a decay of the whole factor cannot be added; use decoupled=True, "
            "or sparse=False in the embedding"
        )
    return factor.part(gradient)


def learning_rates(groups: Sequence[Mapping[str, object]]) -> dict[nn.Parameter, Number]:
    """Return the learning rate of every parameter of an optimizer."""
    return {parameter: group["lr"] for group in groups for parameter in group["params"]}  # type: ignore[misc, attr-defined]
