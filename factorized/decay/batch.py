"""The Frobenius gradients of many forms at once: equal shapes in one batch of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factorized.decay.forms import Factor, Form
from factorized.decay.sharded import Sharded, is_sharded
from factorized.maths.frobenius import frobenius_gradients, product_is_cheaper

# Forms with more entries than this gain nothing from sharing a launch, and would need a second copy of their factors.
LARGEST_BATCHED = 2**20


class Single:
    """A form that is computed by itself, from its factors where they are."""

    def __init__(self, form: Form) -> None:
        self.factors = form.factors

    def gradients(self) -> list[Tensor]:
        """Return the gradient of ½‖U M₁…M_d Vᵀ‖² for every factor, in the order of ``factors``."""
        U, *inner, V = (_computable(factor.value) for factor in self.factors)
        dU, dV, d_inner = frobenius_gradients(U, V, inner)
        return [dU, *d_inner, dV]


class Batch:
    """Forms ``U Vᵀ`` of one shape, their factors copied side by side, ranks padded with zero columns to the largest.

    A zero column adds nothing to the product and gets a zero gradient, so that forms whose ranks differ a little, as a
    budget leaves them, share one batch. Where both factors have equally many rows, one product serves both. All tensors
    are made once: a step allocates nothing, inside a CUDA graph or out of it.
    """

    def __init__(self, members: Sequence[Form]) -> None:
        like = _computable(members[0].left.value)
        rank = max(form.U.shape[-1] for form in members)
        count = sum(form.U.shape[0] for form in members)
        rows, columns = members[0].U.shape[-2], members[0].V.shape[-2]
        sides = [(2, count, rows, rank)] if rows == columns else [(1, count, rows, rank), (1, count, columns, rank)]
        self.values = [like.new_zeros(shape) for shape in sides]
        self.grams = [like.new_zeros(*shape[:2], rank, rank) for shape in sides]
        self.results = [like.new_zeros(shape) for shape in sides]
        self.factors: tuple[Factor, ...] = (*(form.left for form in members), *(form.right for form in members))
        self.slots = self._parts(self.values, members)
        self.parts = self._parts(self.results, members)
        self.sources: list[Tensor] = []

    def gradients(self) -> list[Tensor]:
        """Return the gradient of ½‖U Vᵀ‖² for every factor, in the order of ``factors``; valid until the next call."""
        torch._foreach_copy_(self.slots, self._current_sources())
        for value, gram in zip(self.values, self.grams, strict=True):
            torch.matmul(value.mT, value, out=gram)
        if len(self.values) == 1:
            torch.matmul(self.values[0], self.grams[0].flip(0), out=self.results[0])
        else:
            for value, gram, result in zip(self.values, reversed(self.grams), self.results, strict=True):
                torch.matmul(value, gram, out=result)
        return self.parts

    def _current_sources(self) -> list[Tensor]:
        # Views of parameters stay good as long as the parameters keep their memory, and making them costs time.
        if [source.data_ptr() for source in self.sources] != [f.parameter.data_ptr() for f in self.factors]:
            self.sources = [factor.value for factor in self.factors]
        return self.sources

    def _parts(self, sides: list[Tensor], members: Sequence[Form]) -> list[Tensor]:
        """Return each factor's part of the stacked sides, without the padding."""
        stacked = [side[index] for side in sides for index in range(side.shape[0])]  # U, V
        parts = []
        for side in stacked:
            start = 0
            for form in members:
                size, rank = form.U.shape[0], form.U.shape[-1]
                parts.append(side[start : start + size, :, :rank])
                start += size
        return parts


def batches(found: Sequence[Form]) -> list[Single | Batch | Sharded]:
    """Group forms that can share a batch: equal rows, columns, type and device, and ranks close to each other."""
    alike: dict[tuple[object, ...], list[Form]] = {}
    sharded = [form for form in found if is_sharded(form.left.parameter)]
    for index, form in enumerate(form for form in found if form not in sharded):
        (rows, rank), columns = form.U.shape[-2:], form.V.shape[-2]
        entries = form.left.parameter.numel() + form.right.parameter.numel()
        alone = form.middle or entries > LARGEST_BATCHED or product_is_cheaper(rows, columns, rank, 0, products=3)
        key = (rows, columns, form.U.dtype, form.U.device, -(-rank // 8), index if alone else None)
        alike.setdefault(key, []).append(form)
    units: list[Single | Batch | Sharded] = [Sharded(sharded)] if sharded else []
    return units + [Batch(members) if len(members) > 1 else Single(members[0]) for members in alike.values()]


def _computable(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
