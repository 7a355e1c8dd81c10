"""The Frobenius gradients of forms by torch's own operations, added to tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from factorized._torch import computable, shares_memory
from factorized.decay.forms import Factor, Form
from factorized.decay.sharded import is_sharded, own_gradient, whole
from factorized.decay.strength import Number
from factorized.formats.frobenius import frobenius_gradients, product_is_cheaper


class Part(Protocol):
    """Some forms whose gradients are computed together."""

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all forms."""

    def gradients(self) -> list[Tensor]:
        """Return the gradient of half the squared norm for every factor, in the order of ``factors``."""


class Plain:
    """Any forms, in parts. All are read before a target is changed, so that forms may share factors."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.factors: tuple[Factor, ...] = tuple(factor for part in parts for factor in part.factors)
        self._turns = _turns(self.factors)

    def add_to(self, targets: Sequence[Tensor | None], numbers: Sequence[Number]) -> None:
        """Add ``numbers`` times the gradients to ``targets``, shaped like the parameters of the factors."""
        additions: dict[tuple[int, Number], tuple[list[Tensor], list[Tensor]]] = {}
        first = 0
        for part in self.parts:
            own = slice(first, first + len(part.factors))
            first = own.stop
            if all(target is None for target in targets[own]):
                continue
            found = zip(part.factors, self._turns[own], targets[own], numbers[own], part.gradients(), strict=True)
            for factor, turn, target, number, gradient in found:
                if target is not None:
                    into, gradients = additions.setdefault((turn, number), ([], []))
                    into.append(target if factor.is_whole else factor.part(target))
                    gradients.append(gradient)
        for (_, number), (into, gradients) in additions.items():
            if isinstance(number, Tensor):
                torch._foreach_add_(into, torch._foreach_mul(gradients, number.to(gradients[0].device).reshape(())))
            elif number != 0:
                torch._foreach_add_(into, gradients, alpha=number)


def _turns(factors: Sequence[Factor]) -> list[int]:
    """Number factors that are the same: one launch may add to many tensors, but not twice to the same one."""
    seen: Counter[tuple[nn.Parameter, int, int]] = Counter()
    turns = []
    for factor in factors:
        turns.append(seen[factor.place])
        seen[factor.place] += 1
    return turns


class Alike:
    """Forms of one format, computed as a stack; or a single form.

    Sharded factors are gathered: the cores of formats other than products, and products that are split by columns.
    """

    def __init__(self, members: Sequence[Form]) -> None:
        self.members = list(members)
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in form.factors)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of half the squared norm for every factor, in the order of ``factors``."""
        values = [
            computable(factor.view(whole(factor)) if is_sharded(factor.parameter) else factor.value)
            for factor in self.factors
        ]
        form = self.members[0]
        count = len(form.factors)
        if len(self.members) == 1:
            gradients = form.gradients(values)
        else:
            stacks = form.gradients([torch.stack(values[place::count]) for place in range(count)])
            gradients = [stacks[place][member] for member in range(len(self.members)) for place in range(count)]
        return [_like_target(factor, gradient) for factor, gradient in zip(self.factors, gradients, strict=True)]


def _like_target(factor: Factor, gradient: Tensor) -> Tensor:
    """Return a gradient shaped like its target: this rank's part, or without a batch dimension of one."""
    if is_sharded(factor.parameter):
        return own_gradient(gradient, factor)
    return gradient[0] if factor.is_whole else gradient


class Pair:
    """A product of two matrices that belong to no other form, added without temporary results."""

    def __init__(self, members: Sequence[Form]) -> None:
        (form,) = members
        self.factors: tuple[Factor, ...] = (form.left, form.right)

    def add_to(self, targets: Sequence[Tensor | None], numbers: Sequence[Number]) -> None:
        """Add ``numbers`` times the gradients to ``targets``, shaped like the factors, or the factors themselves."""
        U, V = (factor.parameter for factor in self.factors)
        of_U = U.mT @ U if targets[1] is not None else None
        of_V = V.mT @ V if targets[0] is not None else None
        for factor, gram, target, number in zip((U, V), (of_V, of_U), targets, numbers, strict=True):
            if target is None or gram is None:
                continue
            if isinstance(number, Tensor):
                gram, number = gram * number.to(gram.device), 1.0
            if number == 0:
                continue
            if torch.compiler.is_compiling() or target.dtype != factor.dtype or shares_memory(target, factor):
                # without alpha=, which torch's compiler drops when it makes one operation of the product and the sum
                target.add_(factor @ (gram * number))
            else:
                target.addmm_(factor, gram, alpha=number)


def is_pair(form: Form) -> bool:
    """Return whether a form is two whole matrices whose gradients come from their Gram matrices, in their own type."""
    if not form.is_product or form.middle or not (form.left.is_whole and form.right.is_whole):
        return False
    return not forms_product(form) and computable(form.left.value).dtype == form.U.dtype


def forms_product(form: Form) -> bool:
    """Return whether the product itself is cheaper than Gram matrices."""
    (rows, rank), columns = form.U.shape[-2:], form.V.shape[-2]
    return product_is_cheaper(rows, columns, rank, 0, products=3)


def add_products(
    matrices: Sequence[Tensor],  # U₁, V₁, U₂, V₂, …
    targets: Sequence[Tensor | None],
    numbers: Sequence[Number],
) -> None:
    """Add ``numbers`` times the gradients of ½‖U Vᵀ‖² to ``targets``, in any type, after all have been computed."""
    gradients: list[Tensor | None] = []
    for index in range(0, len(matrices), 2):
        U, V = (computable(matrix) for matrix in matrices[index : index + 2])
        needed = any(target is not None for target in targets[index : index + 2])
        gradients += frobenius_gradients(U, V)[:2] if needed else (None, None)
    for target, number, gradient in zip(targets, numbers, gradients, strict=True):
        if target is None or gradient is None:
            continue
        if isinstance(number, Tensor):
            target.add_(gradient * number.to(gradient.device))
        elif number != 0:
            target.add_(gradient * number)  # without alpha=, see ``Pair``
