"""Random initialization of cores: what each named initialization does to a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from factorized.formats.format import Fill
from factorized.formats.kernel import KernelShape

Init = Literal["spectral", "default", "kaiming", "normal"] | Callable[[Tensor], object]
INITS = ("spectral", "default", "kaiming", "normal")


def check_init(init: object, others: str = "") -> None:
    """Raise unless ``init`` is one of the names or a callable; the message also names what ``others`` does."""
    is_text = isinstance(init, str)
    if init in INITS if is_text else callable(init) and not isinstance(init, type):
        return
    names = ", ".join(f'"{name}"' for name in INITS)
    if isinstance(init, type):
        got = f"the class {init.__name__}"
    else:  # data would be shown whole
        got = f"a value of type {type(init).__name__}" if isinstance(init, Iterable) and not is_text else repr(init)
    raise ValueError(f"init must be one of {names}{others} or a callable that fills a tensor in place, got {got}")


def draw_dense(
    weight: Tensor,  # (out, in, *size), filled in place
) -> None:
    """Draw a dense weight as torch does for a fresh linear or convolution."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


@torch.no_grad()
def draw_bias(
    bias: Tensor | None,  # (out,), filled in place
    fan_in: int,
) -> None:
    """Draw a bias as torch does for a fresh linear or convolution."""
    if bias is not None and not bias.is_meta:
        bias.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


def fill_of(init: Init, shape: KernelShape) -> Fill:
    """Return the function that fills a matrix of a layer of this shape in place.

    ``"kaiming"`` is Kaiming normal on the matrix's own fan-in and ``"normal"`` is N(0, 2/(k²·out)) with the kernel size
    and output channels of the whole layer, the paper's choices for ResNet and VGG; ``"default"`` is what torch does to
    a fresh linear or convolution. A callable fills a tensor in place, like those of ``torch.nn.init``.
    """
    if callable(init):
        return partial(_fill_by, init)
    if init == "kaiming":
        return nn.init.kaiming_normal_
    if init == "normal":
        deviation = math.sqrt(2 / (shape.out_channels * math.prod(shape.size)))
        return lambda matrix: matrix.normal_(0, deviation)
    return draw_dense


def _fill_by(init: Callable[[Tensor], object], matrix: Tensor) -> None:
    """Fill ``matrix`` by a user's function; raise if it leaves entries as they are, whatever the memory held."""
    matrix.fill_(torch.nan)
    init(matrix.detach())  # which shares its memory: replacing its data fills nothing
    if not matrix.is_meta and matrix.isnan().any():
        name = getattr(init, "__name__", type(init).__name__)
        raise ValueError(
            f"init must fill the tensor that it is given in place, as the functions of torch.nn.init do, but {name} "
            f"left entries of a {'x'.join(map(str, matrix.shape))} tensor unfilled; what it returns is not used"
        )
