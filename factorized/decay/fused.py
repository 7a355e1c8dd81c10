"""The Frobenius gradients of many products on a GPU, by custom kernels that add them in place: two launches for all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from factorized._torch import triton_capability
from factorized.decay.forms import Factor, Form
from factorized.decay.plain import add_products
from factorized.decay.strength import Number

logger = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_RANK = 128  # more was not measured
CAPABILITY = (8, 0)  # of GPUs whose tensor cores support tf32
MOST = 128  # products in one launch, whose arguments hold the addresses of their targets: CUDA allows 4 KiB


class Tiles(NamedTuple):
    """The sizes of a kernel program's block."""

    block: int = 32  # columns
    rows: int = 64  # of a product
    step: int = 32  # rows that a Gram matrix takes at a time
    span: int = 4  # rows of one sum of Gram matrices, for each column: the sums are a quarter of the factor


TILES = Tiles()


class Fused:
    """Forms ``U Vᵀ`` of any shapes, of whole matrices that belong to no other form."""

    def __init__(self, members: Sequence[Form]) -> None:
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in (form.left, form.right))
        matrices = [factor.parameter for factor in self.factors]
        self.launches = [Products(matrices[first : first + 2 * MOST]) for first in range(0, len(matrices), 2 * MOST)]

    def add_to(self, targets: Sequence[Tensor | None], numbers: Sequence[Number]) -> None:
        """Add ``numbers`` times the gradients to ``targets``, shaped like the factors, or the factors themselves."""
        for index, products in enumerate(self.launches):
            part = slice(2 * MOST * index, 2 * MOST * (index + 1))
            products.add_to(targets[part], numbers[part])


class Products:
    """Products ``U Vᵀ`` of one type, which the kernels decay at once.

    All tables are made once, so that a captured step allocates nothing. It must have run before it is captured.
    """

    def __init__(self, matrices: Sequence[Tensor], tiles: Tiles = TILES) -> None:
        self.matrices = list(matrices)  # U₁, V₁, U₂, V₂, …
        self.shapes = [(rows, rank) for rows, rank in (matrix.shape for matrix in matrices)]
        self.dtype, self.device, self.sizes = matrices[0].dtype, matrices[0].device, tiles
        blocks, self.sums_of, size = _cut_grams(self.shapes, tiles)
        self.blocks = torch.tensor(blocks, device=self.device)
        self.tiles = torch.tensor(_cut_products(self.shapes, tiles), device=self.device)
        self.sums = torch.empty(size, dtype=torch.float32, device=self.device)
        self.places = torch.empty(len(matrices), dtype=torch.int64, device=self.device)
        self.ones = torch.ones(len(matrices), dtype=torch.float32, device=self.device)
        self.coefficients = torch.empty_like(self.ones)
        self._memory: list[tuple[int, ...]] = []
        self.by_rows = False  # whether the columns of all matrices are next to each other
        self._tables: dict[bool, Tensor] = {}  # of the matrices, and of their copies
        # builds the kernels, which a step that is being captured cannot do
        self.add_to([None] * len(matrices), [0.0] * len(matrices))

    @torch.no_grad()
    def add_to(self, targets: Sequence[Tensor | None], numbers: Sequence[Number]) -> None:
        """Add ``numbers`` times the gradients of ½‖U Vᵀ‖² to ``targets``, which may be the matrices themselves."""
        if torch.compiler.is_compiling():  # the compiler has no addresses, and makes its own kernels
            add_products(self.matrices, targets, numbers)
            return
        known = [t is None or _is_laid_out_alike(t, m) for t, m in zip(targets, self.matrices, strict=True)]
        if not all(known):
            unknown = [None if is_known else target for is_known, target in zip(known, targets, strict=True)]
            add_products(self.matrices, unknown, numbers)
            targets = [target if is_known else None for is_known, target in zip(known, targets, strict=True)]
        addresses = [m.data_ptr() if t is None else t.data_ptr() for t, m in zip(targets, self.matrices, strict=True)]
        given = [0.0 if target is None else number for target, number in zip(targets, numbers, strict=True)]
        plain = [1.0 if isinstance(number, Tensor) else float(number) for number in given]
        launch(self, self._table(targets), addresses, plain, self._scales(given))

    def _scales(self, numbers: Sequence[Number]) -> Tensor:  # (factors,)
        """Return the numbers that are tensors, and ones for others."""
        if not any(isinstance(number, Tensor) for number in numbers):
            return self.ones
        one = self.ones[0]
        return torch.stack([n.to(self.device).reshape(()) if isinstance(n, Tensor) else one for n in numbers]).float()

    def _table(self, targets: Sequence[Tensor | None]) -> Tensor:
        """Return where the factors are: copies of them, if they are the targets."""
        memory = [(matrix.data_ptr(), *matrix.stride()) for matrix in self.matrices]
        if memory != self._memory:  # a parameter has moved in memory
            self._memory, self._tables = memory, {}
            self.by_rows = all(matrix.stride(1) == 1 or matrix.shape[1] == 1 for matrix in self.matrices)
        own = {address for address, *_ in memory}
        copied = any(target is not None and target.data_ptr() in own for target in targets)
        if copied:
            torch._foreach_copy_(self.copies, self.matrices)
        if copied not in self._tables:
            self._tables[copied] = self._tabulate(self.copies if copied else self.matrices)
        return self._tables[copied]

    @cached_property
    def copies(self) -> list[Tensor]:
        """Memory for copies of all factors."""
        sizes = [rows * rank for rows, rank in self.shapes]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        return [part.view(shape) for part, shape in zip(flat.split(sizes), self.shapes, strict=True)]

    def _tabulate(self, sources: Sequence[Tensor]) -> Tensor:  # (factors, 9), see ``kernels.py``
        rows = []
        for index, (source, matrix) in enumerate(zip(sources, self.matrices, strict=True)):
            partner = self.sums_of[index ^ 1]  # U and V are next to each other
            rows.append((source.data_ptr(), *matrix.shape, *source.stride(), *matrix.stride(), *partner))
        return torch.tensor(rows, device=self.device)


def _cut_grams(
    shapes: Sequence[tuple[int, int]], tiles: Tiles
) -> tuple[list[tuple[int, ...]], list[tuple[int, int]], int]:
    """Return a program for every block of a sum, the longest first; where each factor's sums begin and how many it has;
    and how many entries all sums have.
    """
    programs, sums, size = [], [], 0
    for factor, (rows, rank) in enumerate(shapes):
        padded = -(-rank // tiles.block) * tiles.block
        spans = range(0, rows, tiles.span * padded)
        sums.append((size, len(spans)))
        for first in spans:
            last = min(rows, first + spans.step)
            columns = range(0, rank, tiles.block)
            programs += [
                (factor, first, last, left, right, size) for left in columns for right in columns[left // tiles.block :]
            ]
            size += padded * padded
    return sorted(programs, key=lambda program: program[1] - program[2]), sums, size


def _cut_products(shapes: Sequence[tuple[int, int]], tiles: Tiles) -> list[tuple[int, int, int]]:
    """Return a program for every tile of every product."""
    return [
        (factor, row, column)
        for factor, (rows, rank) in enumerate(shapes)
        for row in range(0, rows, tiles.rows)
        for column in range(0, rank, tiles.block)
    ]


def launch(
    products: Products, factors: Tensor, addresses: Sequence[int], numbers: Sequence[float], scales: Tensor
) -> None:
    """Launch both kernels."""
    from factorized.decay.kernels import TYPES, gram_kernel, odd, product_kernel

    sizes, notes = products.sizes, (products.places, products.coefficients)
    with torch.cuda.device_of(scales):  # Triton launches on the current GPU
        gram_kernel[(len(products.blocks),)](
            *(products.blocks, factors, products.sums, *notes, tuple(map(odd, addresses)), tuple(numbers)),
            DTYPE=TYPES[products.dtype],
            ROWS=sizes.step,
            BLOCK=sizes.block,
            BY_ROWS=products.by_rows,
            num_stages=4,
        )
        product_kernel[(len(products.tiles),)](
            *(products.tiles, factors, products.sums, *notes, scales),
            DTYPE=TYPES[products.dtype],
            ROWS=sizes.rows,
            BLOCK=sizes.block,
            BY_ROWS=products.by_rows,
            num_warps=sizes.rows // 16,
        )


def _is_laid_out_alike(target: Tensor, matrix: Tensor) -> bool:
    """Return whether the kernels can write to a target as they read the matrix: its type, and strides that matter."""
    strides = zip(target.stride(), matrix.stride(), matrix.shape, strict=True)
    return target.dtype == matrix.dtype and all(a == b or size == 1 for a, b, size in strides)


def _last_place(matrix: Tensor) -> int:
    """Return how far the last entry is from the first; the kernels count in 32 bits."""
    return sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))


def is_fusible(form: Form) -> bool:
    """Return whether the kernels can compute a form: two whole matrices on a GPU, of a supported rank and type."""
    left, right = form.left, form.right
    return (
        left.parameter.is_cuda
        and not form.middle
        and left.is_whole
        and right.is_whole
        and left.parameter.shape[1] <= LARGEST_RANK
        and all(_last_place(factor.parameter) < 2**31 for factor in (left, right))
        and left.parameter.dtype in DTYPES
        and left.parameter.dtype == right.parameter.dtype
        and can_build_kernels(left.parameter.device)
    )


@cache
def can_build_kernels(device: torch.device) -> bool:
    """Return whether the kernels can be built for ``device``, by building them; this needs Triton and a C compiler."""
    if triton_capability(device) < CAPABILITY:
        return False
    try:
        Products([torch.ones(1, 1, dtype=torch.float32, device=device)] * 2)
    except Exception as error:  # a compiler that is missing, or may not write, can fail in any way
        logger.info("the decay's kernels could not be built; using torch operations instead: %s", error)
        return False
    return True
