"""The Frobenius gradients of many small forms on a GPU, by custom kernels: two launches for all of similar rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from factorized._torch import computable, triton_capability
from factorized.decay.forms import Factor, Form
from factorized.formats.frobenius import frobenius_gradients

logger = logging.getLogger(__name__)
ROWS = 64  # of a factor, in one program
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANKS = (16, 32, 64)  # ranks are padded to these, inside the kernels only
CAPABILITY = (8, 0)  # of GPUs whose tensor cores support tf32


@dataclass
class _Alike:
    """Factors whose ranks are padded to one number."""

    padded: int
    tiles: Tensor  # (tiles, 2): factor, first row
    factors: Tensor  # (factors, 8), see ``kernels.py``
    sums: Tensor  # (tiles, padded, padded): the Gram matrix of every tile


class Fused:
    """Forms ``U Vᵀ`` of any shapes; all tensors are made once, so that a captured step allocates nothing."""

    def __init__(self, members: Sequence[Form]) -> None:
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in (form.left, form.right))
        self.matrices = [factor.parameter for factor in self.factors]
        self.dtype, self.device = self.matrices[0].dtype, self.matrices[0].device
        sizes = [matrix.numel() for matrix in self.matrices]
        self.results = torch.empty(sum(sizes), device=self.device)
        self.begins = [0, *accumulate(sizes)]
        parts = zip(self.results.split(sizes), self.matrices, strict=True)
        self.parts = [part.view(matrix.shape) for part, matrix in parts]
        self._memory = self._read_memory()
        self._alike = self._lay_out(self._memory)
        self._launch()  # builds the kernels, which a step that is being captured cannot do

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """Return the gradient of ½‖U Vᵀ‖² for every factor, in the order of ``factors``; valid until the next call."""
        if torch.compiler.is_compiling():  # the compiler has no addresses, and makes its own kernels
            pairs = zip(self.matrices[::2], self.matrices[1::2], strict=True)
            return [dX for U, V in pairs for dX in frobenius_gradients(computable(U), computable(V))[:2]]
        memory = self._read_memory()
        if memory != self._memory:  # a parameter has moved in memory
            self._memory, self._alike = memory, self._lay_out(memory)
        self._launch()
        return self.parts

    def _launch(self) -> None:
        for alike in self._alike:
            launch(alike, self.results, self.dtype)

    def _read_memory(self) -> list[tuple[int, ...]]:
        """Return where every factor is: its address and strides."""
        return [(matrix.data_ptr(), *matrix.stride()) for matrix in self.matrices]

    def _lay_out(self, memory: Sequence[tuple[int, ...]]) -> list[_Alike]:
        held: dict[int, list[int]] = {}
        for position, matrix in enumerate(self.matrices):
            held.setdefault(_padded(matrix.shape[1]), []).append(position)
        return [self._tabulate(padded, positions, memory) for padded, positions in held.items()]

    def _tabulate(self, padded: int, positions: Sequence[int], memory: Sequence[tuple[int, ...]]) -> _Alike:
        tiles: list[tuple[int, int]] = []
        first: dict[int, int] = {}
        for place, position in enumerate(positions):
            first[position] = len(tiles)
            tiles += [(place, row) for row in range(0, self.matrices[position].shape[0], ROWS)]
        rows = []
        for position in positions:
            partner = position ^ 1  # U and V are next to each other
            address, *strides = memory[position]
            count = -(-self.matrices[partner].shape[0] // ROWS)
            shape = self.matrices[position].shape
            rows.append((address, *shape, *strides, self.begins[position], first[partner], count))
        return _Alike(
            padded,
            torch.tensor(tiles, device=self.device),
            torch.tensor(rows, device=self.device),
            torch.empty(len(tiles), padded, padded, device=self.device),
        )


def launch(alike: _Alike, results: Tensor, dtype: torch.dtype) -> None:
    """Write the gradients of all factors of one padded rank into ``results``."""
    from factorized.decay.kernels import TYPES, gram_kernel, product_kernel

    grid, tables = (len(alike.tiles),), (alike.tiles, alike.factors, alike.sums)
    with torch.cuda.device(results.device):
        gram_kernel[grid](*tables, DTYPE=TYPES[dtype], ROWS=ROWS, R=alike.padded)
        product_kernel[grid](*tables, results, DTYPE=TYPES[dtype], ROWS=ROWS, R=alike.padded)


def is_fusible(form: Form) -> bool:
    """Return whether the kernels can compute a form: two whole matrices on a GPU, of a supported rank and type."""
    left, right = form.left, form.right
    return (
        left.parameter.is_cuda
        and not form.middle
        and left.is_whole
        and right.is_whole
        and left.parameter.shape[1] <= RANKS[-1]
        and left.parameter.dtype in DTYPES
        and left.parameter.dtype == right.parameter.dtype
        and can_build_kernels(left.parameter.device)
    )


@cache
def can_build_kernels(device: torch.device) -> bool:
    """Return whether the kernels can be built for ``device``, by building them; this needs Triton and a C compiler."""
    if triton_capability(device) < CAPABILITY:
        return False
    number = torch.ones(1, device=device)
    trial = _Alike(
        RANKS[0],
        tiles=torch.tensor([[0, 0]], device=device),
        factors=torch.tensor([[number.data_ptr(), 1, 1, 1, 1, 0, 0, 1]], device=device),
        sums=torch.empty(1, RANKS[0], RANKS[0], device=device),
    )
    try:
        launch(trial, torch.empty_like(number), number.dtype)
    except Exception as error:  # a compiler that is missing, or may not write, can fail in any way
        logger.info("the decay's kernels could not be built; using torch operations instead: %s", error)
        return False
    return True


def _padded(rank: int) -> int:
    return next(padded for padded in RANKS if rank <= padded)
