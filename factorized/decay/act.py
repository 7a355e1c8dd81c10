"""Adding the Frobenius gradients of forms to tensors, many at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from factorized.decay.batch import Single, batches
from factorized.decay.forms import AnyForm, Factor
from factorized.decay.local import placed_like
from factorized.decay.strength import Number
from factorized.maths.frobenius import without_autocast

# What the gradient of a factor is added to, shaped like its parameter; None leaves the factor out.
Target = Callable[[Factor], Tensor | None]
Place = tuple[torch.device, torch.dtype, torch.Size]  # of a parameter: what units depend on


class FrobeniusEngine:
    """Computes the Frobenius gradients of some forms, again and again."""

    def __init__(self, found: Sequence[AnyForm]) -> None:
        self.form_of: dict[Factor, AnyForm] = {factor: form for form in found for factor in form.factors}
        self._parameters = list(dict.fromkeys(factor.parameter for factor in self.form_of))
        self.units = batches(found)
        self._made_for: list[Place] = self._places()
        self._turn = _turns(self.form_of)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles carry: who computes what is found out where they are used."""
        return {**self.__dict__, "units": [], "_made_for": []}

    def add(self, target: Target, coefficient: Callable[[Factor], Number], *, to_factors: bool = False) -> None:
        """Add ``coefficient(factor)`` times every factor's gradient to its ``target``.

        ``to_factors`` says that the targets are the factors themselves: then none is changed before all are read.
        """
        if self._places() != self._made_for:  # parameters were moved, or changed their type or shape
            self.units, self._made_for = batches(list(dict.fromkeys(self.form_of.values()))), self._places()
        with torch.no_grad(), without_autocast(*(parameter.device for parameter in self._parameters)):
            self._add(target, coefficient, to_factors)

    def _add(self, target: Target, coefficient: Callable[[Factor], Number], to_factors: bool) -> None:
        additions: dict[tuple[int, Number], tuple[list[Tensor], list[Tensor]]] = {}
        for unit in self.units:
            targets = [target(factor) for factor in unit.factors]
            if all(tensor is None for tensor in targets):
                continue
            numbers = [0.0 if t is None else coefficient(f) for f, t in zip(unit.factors, targets, strict=True)]
            plain = [number for number in numbers if not isinstance(number, Tensor)]
            if isinstance(unit, Single) and unit.is_plain and len(plain) == 2 and not to_factors:
                unit.add_to(targets, plain)
                continue
            for factor, tensor, number, gradient in zip(unit.factors, targets, numbers, unit.gradients(), strict=True):
                if tensor is not None:
                    into, parts = additions.setdefault((self._turn[factor], number), ([], []))
                    into.append(tensor if factor.is_whole else factor.part(tensor))
                    parts.append(gradient)
        for (_, number), (into, parts) in additions.items():
            if isinstance(number, Tensor):
                torch._foreach_add_(into, torch._foreach_mul(parts, number.to(parts[0].device).reshape(())))
            elif number != 0:
                torch._foreach_add_(into, parts, alpha=number)

    def _places(self) -> list[Place]:
        return [(parameter.device, parameter.dtype, parameter.shape) for parameter in self._parameters]


def _turns(factors: Iterable[Factor]) -> dict[Factor, int]:
    """Number the factors that are one parameter: a GPU may add to many tensors at once, but not twice to one."""
    seen: Counter[nn.Parameter] = Counter()
    turns = {}
    for factor in factors:
        turns[factor] = seen[factor.parameter] if factor.projection is None else 0  # projections are parts that differ
        seen[factor.parameter] += 1
    return turns


def gradient_of(factor: Factor) -> Tensor | None:
    """Return the gradient of the factor's parameter; None where there is none to add to, as for any optimizer."""
    parameter = factor.parameter
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad:
        return None
    if gradient.is_sparse:
        raise ValueError(
            f"{factor.name} has a sparse gradient, to which a decay of the whole factor cannot be added; use "
            "decoupled=True, or sparse=False in the embedding"
        )
    placed = placed_like(gradient, parameter)
    if placed is not gradient:  # what every rank adds to a partial sum would count several times
        parameter.grad = placed
    return placed
