"""The Frobenius gradients of many small forms on a GPU, by kernels of our own: two launches for all of like rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from factorized.decay.forms import Factor, Form

ROWS = 64  # of a factor, in one program
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANKS = (16, 32, 64, 128)  # what ranks are padded to, inside the kernels only


@dataclass
class _Alike:
    """Factors whose ranks are padded to one number."""

    padded: int
    tiles: Tensor  # (tiles, 2): factor, first row
    factors: Tensor  # (factors, 6): address, rows, rank, where its results begin, its partner's first tile and tiles
    sums: Tensor  # (tiles, padded, padded): the Gram matrix of every tile


class Fused:
    """Forms ``U Vᵀ`` of any shapes; all tensors are made once, so that a captured step allocates nothing."""

    def __init__(self, members: Sequence[Form]) -> None:
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in (form.left, form.right))
        self.dtype, self.device = members[0].left.parameter.dtype, members[0].left.parameter.device
        sizes = [factor.parameter.numel() for factor in self.factors]
        self.results = torch.empty(sum(sizes), device=self.device)
        parts = zip(self.results.split(sizes), self.factors, strict=True)
        self.parts = [part.view(factor.parameter.shape) for part, factor in parts]
        self._addresses = self._read_addresses()
        self._alike = self._lay_out()

    def gradients(self) -> list[Tensor]:
        """Return the gradient of ½‖U Vᵀ‖² for every factor, in the order of ``factors``; valid until the next call."""
        from factorized.decay.kernels import TYPES, gram_kernel, product_kernel

        addresses = self._read_addresses()
        if addresses != self._addresses:  # a parameter was given other memory
            self._addresses = addresses
            self._alike = self._lay_out()
        kind = TYPES[self.dtype]
        with torch.cuda.device(self.device):
            for alike in self._alike:
                grid, warps = (len(alike.tiles),), 8 if alike.padded > 64 else 4
                of_tiles = (alike.tiles, alike.factors, alike.sums)
                gram_kernel[grid](*of_tiles, DTYPE=kind, ROWS=ROWS, R=alike.padded, num_warps=warps)
                product_kernel[grid](*of_tiles, self.results, DTYPE=kind, ROWS=ROWS, R=alike.padded, num_warps=warps)
        return self.parts

    def _read_addresses(self) -> list[int]:
        return [factor.parameter.data_ptr() for factor in self.factors]

    def _lay_out(self) -> list[_Alike]:
        begins = [0]
        for factor in self.factors:
            begins.append(begins[-1] + factor.parameter.numel())
        held: dict[int, list[int]] = {}
        for position, factor in enumerate(self.factors):
            held.setdefault(_padded(factor.parameter.shape[1]), []).append(position)
        made = []
        for padded, positions in held.items():
            tiles: list[tuple[int, int]] = []
            first: dict[int, int] = {}
            for place, position in enumerate(positions):
                first[position] = len(tiles)
                tiles += [(place, row) for row in range(0, self.factors[position].parameter.shape[0], ROWS)]
            rows = []
            for position in positions:
                shape, partner = self.factors[position].parameter.shape, position ^ 1  # U and V stand side by side
                count = -(-self.factors[partner].parameter.shape[0] // ROWS)
                rows.append((self._addresses[position], *shape, begins[position], first[partner], count))
            made.append(
                _Alike(
                    padded,
                    torch.tensor(tiles, device=self.device),
                    torch.tensor(rows, device=self.device),
                    torch.empty(len(tiles), padded, padded, device=self.device),
                )
            )
        return made


def is_fusible(form: Form) -> bool:
    """Say whether the kernels can compute a form: contiguous matrices on a GPU, of a rank and a type that they know."""
    factors = (form.left, form.right)
    return (
        form.left.parameter.is_cuda
        and not form.middle
        and all(factor.is_whole and factor.parameter.is_contiguous() for factor in factors)
        and form.left.parameter.shape[1] <= RANKS[-1]
        and form.left.parameter.dtype in DTYPES
        and form.left.parameter.dtype == form.right.parameter.dtype
        and has_triton()
    )


@cache
def has_triton() -> bool:
    """Say whether Triton, which compiles the kernels, is installed; torch for CUDA brings it on Linux."""
    return find_spec("triton") is not None and torch.version.hip is None


def _padded(rank: int) -> int:
    return next(padded for padded in RANKS if rank <= padded)
