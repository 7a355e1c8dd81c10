"""The Frobenius gradients of tensors in a format; those of one format in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factorized.decay.forms import Factor, TensorForm, computable
from factorized.decay.sharded import is_sharded, own_rows, whole


class Tensors:
    """Tensors of one format. Cores that are sharded are gathered: they are small, and each is needed whole."""

    def __init__(self, members: Sequence[TensorForm]) -> None:
        self.members = list(members)
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in form.factors)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of half the squared norm for every core, in the order of ``factors``."""
        cores = [computable(whole(f) if is_sharded(f.parameter) else f.value) for f in self.factors]
        count, format = len(self.members[0].factors), self.members[0].format
        if len(self.members) == 1:
            gradients = list(format.gradients(cores))
        else:
            stacks = format.gradients([torch.stack(cores[place::count]) for place in range(count)])
            gradients = [stacks[place][member] for member in range(len(self.members)) for place in range(count)]
        return [
            own_rows(gradient, factor) if is_sharded(factor.parameter) else gradient
            for gradient, factor in zip(gradients, self.factors, strict=True)
        ]
