"""The Frobenius gradients of many small forms on a GPU, in a handful of launches.

On a GPU launches cost more than the arithmetic. So the factors of all forms are gathered into a few batches,
padded with zeros in rows and columns: zeros add nothing to a Gram matrix and get a zero gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factorized.decay.forms import Factor, Form


@dataclass
class _Padded:
    """Factors of similar size in one batch (count, rows, rank), filled by one gather."""

    index: Tensor  # where each entry is among all factors; padding points to the zero
    values: Tensor
    results: Tensor
    grams: Tensor  # a slice of all Gram matrices of this rank
    all_grams: Tensor
    partners: Tensor  # indices of the Gram matrices of the other factors


class Arena:
    """Forms ``U Vᵀ`` of any shapes; all tensors are made once, so that a captured step allocates nothing."""

    def __init__(self, members: Sequence[Form]) -> None:
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in (form.left, form.right))
        self.shapes = [tuple(factor.value.shape) for factor in self.factors]  # (batch, rows, rank)
        like = self.factors[0].value
        dtype = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
        sizes = [factor.value.numel() for factor in self.factors]
        self.flat = torch.zeros(sum(sizes) + 1, dtype=dtype, device=like.device)  # the last entry is the zero
        self.gathered = torch.empty(sum(sizes), dtype=dtype, device=like.device)
        parts = zip(self.factors, self.gathered.split(sizes), self.shapes, strict=True)
        self.parts = [part.view(shape[1:] if factor.is_whole else shape) for factor, part, shape in parts]
        self.starts = [sum(sizes[:position]) for position in range(len(sizes))]
        self.batches: list[_Padded] = []
        self.results = torch.empty(0, dtype=dtype, device=like.device)
        # where each factor's entries are among the results
        self.back = torch.empty(sum(sizes), dtype=torch.int64, device="cpu")
        self._lay_out()
        self.back = self.back.to(like.device)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of ½‖U Vᵀ‖² for every factor, in the order of ``factors``; valid until the next call."""
        torch.cat([factor.value.reshape(-1).to(self.flat.dtype) for factor in self.factors], out=self.flat[:-1])
        for batch in self.batches:
            torch.index_select(self.flat, 0, batch.index, out=batch.values.view(-1))
            torch.bmm(batch.values.mT, batch.values, out=batch.grams)
        for batch in self.batches:
            torch.bmm(batch.values, batch.all_grams.index_select(0, batch.partners), out=batch.results)
        torch.index_select(self.results, 0, self.back, out=self.gathered)
        return self.parts

    def _lay_out(self) -> None:
        """Assign every factor to the batch of its padded rank; one that would be mostly padding is split by rows."""
        classes: dict[tuple[int, int], list[int]] = {}
        for position, (_, rows, rank) in enumerate(self.shapes):
            padded = -(-rank // 8) * 8
            classes.setdefault((padded, self._row_class(padded, rows)), []).append(position)
        extents = {key: max(self.shapes[position][1] for position in held) for key, held in classes.items()}
        counts = {key: sum(self.shapes[position][0] for position in held) for key, held in classes.items()}
        self.results = self.flat.new_empty(sum(counts[key] * extents[key] * key[0] for key in classes))
        ranks = {rank for rank, _ in classes}
        grams = {
            rank: self.flat.new_empty(sum(counts[k] for k in classes if k[0] == rank), rank, rank) for rank in ranks
        }
        place, used = {}, dict.fromkeys(ranks, 0)  # index of each factor's first Gram matrix among those of its rank
        for (rank, _), held in classes.items():
            for position in held:
                place[position] = used[rank]
                used[rank] += self.shapes[position][0]
        start = 0
        for key, held in classes.items():
            rank, rows, count = key[0], extents[key], counts[key]
            size = count * rows * rank
            first = place[held[0]]
            partners = [
                place[p ^ 1] + g for p in held for g in range(self.shapes[p][0])
            ]  # U and V are next to each other
            self.batches.append(
                _Padded(
                    index=self._index(held, count, rows, rank, start).to(self.flat.device),
                    values=self.flat.new_empty(count, rows, rank),
                    results=self.results[start : start + size].view(count, rows, rank),
                    grams=grams[rank][first : first + count],
                    all_grams=grams[rank],
                    partners=torch.tensor(partners, device=self.flat.device),
                )
            )
            start += size

    def _row_class(self, padded: int, rows: int) -> int:
        alike = [(batch, own) for batch, own, rank in self.shapes if -(-rank // 8) * 8 == padded]
        filled, whole = sum(batch * own for batch, own in alike), sum(batch for batch, _ in alike)
        wasteful = whole * max(own for _, own in alike) > 4 * filled
        return (rows - 1).bit_length() // 2 if wasteful else 0

    def _index(self, held: Sequence[int], count: int, rows: int, rank: int, start: int) -> Tensor:
        """Return where the entries of one padded batch come from, and record where they go back to."""
        index = torch.full((count, rows, rank), self.flat.numel() - 1, device="cpu")
        places = torch.arange(start, start + index.numel(), device="cpu").view_as(index)
        entry = 0
        for position in held:
            batch, own_rows, own_rank = self.shapes[position]
            own = torch.arange(batch * own_rows * own_rank, device="cpu") + self.starts[position]
            index[entry : entry + batch, :own_rows, :own_rank] = own.view(batch, own_rows, own_rank)
            self.back[own] = places[entry : entry + batch, :own_rows, :own_rank].reshape(-1)
            entry += batch
        return index.view(-1)
