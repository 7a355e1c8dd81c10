"""The Frobenius gradients of many forms on the CPU, by kernels of our own: one call for all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from factorized.decay.build import MAX_RANK, NUMBERS, cpu_kernels
from factorized.decay.forms import Factor, Form
from factorized.decay.strength import Number
from factorized.maths.frobenius import frobenius_gradients, product_is_cheaper

LARGEST = 2**18  # entries of both factors: what is larger is more than one thread should have
GRAIN = 2**20  # multiplications: less is done, by one thread, before others have heard of it
ARRAYS: dict[torch.dtype, Literal["f", "d"]] = {torch.float32: "f", torch.float64: "d"}


class Native:
    """Forms ``U Vᵀ`` of any shapes and one type, which share no parameter."""

    def __init__(self, members: Sequence[Form]) -> None:
        ordered = sorted(members, key=_work, reverse=True)  # what takes long comes first: the threads end together
        self.factors: tuple[Factor, ...] = tuple(factor for form in ordered for factor in (form.left, form.right))
        self.matrices = [factor.parameter for factor in self.factors]
        self.dtype = self.matrices[0].dtype
        self._count = len(ordered)
        self._shapes = array("q", [n for form in ordered for n in (*form.U.shape[-2:-1], *form.V.shape[-2:])])
        self._is_work_for_many = sum(map(_work, members)) >= GRAIN

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """Return the gradient of ½‖U Vᵀ‖² for every factor, in the order of ``factors``."""
        results = [torch.zeros_like(matrix) for matrix in self.matrices]
        if not torch.compiler.is_compiling() and self.add_to(results, [1.0] * len(results)):
            return results
        pairs = zip(self.matrices[::2], self.matrices[1::2], strict=True)
        return [dX for U, V in pairs for dX in frobenius_gradients(U, V)[:2]]

    def add_to(self, targets: Sequence[Tensor | None], numbers: Sequence[Number]) -> bool:
        """Add ``numbers`` times the gradients to ``targets``, each of which may be its parameter itself.

        Return False, with nothing done, where a target cannot be written as it lies.
        """
        values = [m if m.is_contiguous() and not m.is_neg() else _plain_copy(m) for m in self.matrices]
        sources = array("Q", [value.data_ptr() for value in values])
        places: array[int] = array("Q")
        alphas: array[float] = array(ARRAYS[self.dtype])
        written = []
        for value, target, number in zip(values, targets, numbers, strict=True):
            alpha = number.item() if isinstance(number, Tensor) else number
            alphas.append(alpha)
            if target is None or alpha == 0:
                places.append(0)
                continue
            if target.dtype is not self.dtype or target.numel() != value.numel():
                return False
            if not target.is_contiguous() or target.is_neg():
                return False
            places.append(target.data_ptr())
            written.append(target)
        if not _are_apart(places, sources, len(written)):
            return False
        add_gradients = cpu_kernels(self.dtype)
        assert add_gradients is not None, "is_native was asked before"
        shapes, *arrays = (each.buffer_info()[0] for each in (self._shapes, sources, places, alphas))
        threads = torch.get_num_threads() if self._is_work_for_many else 1
        add_gradients(shapes, self._count, *arrays, threads)
        torch.autograd.graph.increment_version(written)
        return True


def is_native(form: Form) -> bool:
    """Say whether the kernels can compute a form: two whole matrices on the CPU, of a rank and a type they know."""
    (rows, rank), columns = form.U.shape[-2:], form.V.shape[-2]
    return (
        not form.middle
        and form.left.is_whole
        and form.right.is_whole
        and all(_is_plain(factor.parameter) for factor in form.factors)
        and form.left.parameter.dtype is form.right.parameter.dtype
        and rank <= MAX_RANK
        and (rows + columns) * rank <= LARGEST
        and not product_is_cheaper(rows, columns, rank, 0, products=3)
        and cpu_kernels(form.left.parameter.dtype) is not None
    )


def _plain_copy(matrix: Tensor) -> Tensor:
    return matrix.detach().contiguous().resolve_neg()


def _are_apart(places: array[int], sources: array[int], count: int) -> bool:
    """Say whether ``count`` places are written, each once, and none of them that another factor is read from."""
    if 0 not in places and len({*places, *sources}) == count + len(sources):  # as almost always
        return True
    different = set(places) - {0}
    own = sum(place == source for place, source in zip(places, sources, strict=True))
    return len(different) == count and len(different & set(sources)) == own


def _work(form: Form) -> int:
    (rows, rank), columns = form.U.shape[-2:], form.V.shape[-2]
    return 2 * (rows + columns) * rank**2  # multiplications


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.device.type == "cpu" and parameter.dtype in NUMBERS
