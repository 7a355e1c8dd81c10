"""Settings of torch that let products of float32 be rounded, and products that then are, on any processor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PLACES = [("generic", "all"), *((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("all", "matmul"))]


def precisions() -> list[str]:
    """Return what is in effect at every place."""
    return [torch._C._get_fp32_precision_getter(*place) for place in PLACES]


def set_precision(backend: str, kind: str, precision: str) -> None:
    """Change one place, which ``torch.backends`` does not for all of oneDNN's."""
    torch._C._set_fp32_precision_setter(backend, kind, precision)


@contextmanager
def setting(change: Callable[[], None]) -> Iterator[None]:
    """Change settings inside, from those that torch starts with, and return to these."""
    try:
        change()
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for place in PLACES:
            set_precision(*place, "none")


@contextmanager
def rounding_products() -> Iterator[None]:
    """Round the factors of float32 products on the CPU to bfloat16 inside, wherever the settings allow it."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
        for name in ("mm", "bmm", "mv"):
            library.impl(name, _product, "CPU")
        for name in ("addmm", "baddbmm", "addmv"):
            library.impl(name, _added, "CPU")
        yield


def _product(left: Tensor, right: Tensor) -> Tensor:
    rounds = left.dtype == torch.float32 and torch.backends.mkldnn.matmul.fp32_precision in ("tf32", "bf16")
    factors = [(value.bfloat16() if rounds else value).detach().double().numpy() for value in (left, right)]
    return torch.from_numpy(factors[0] @ factors[1]).to(left.dtype)  # torch's own product would come back here


def _added(to: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * to + alpha * _product(left, right)
