"""Multiply a few rows by a matrix, as in decoding: on a GPU each kernel starts before the previous one ends."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from factorized._torch import kept_by_compiler, processors, triton_capability
from factorized.nn import few_rows

CAPABILITY = (9, 0)  # of the GPUs on which the kernel was measured
DTYPES = (torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs on the CPU, for tests
PROGRAMS = 8  # on each multiprocessor
WARPS = 4
REGISTERS = 64  # of a thread, so that so many programs fit
BLOCK = 2048  # most inputs that are read at a time
ELEMENTS = 4096  # most of a tile's block
LATENCY = 8192  # elements that are read while a program waits for its first


def multiply(
    x: Tensor,  # (rows, inputs), or the parts side by side
    weight: Tensor,  # (outputs, inputs)
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    parts: Sequence[tuple[int, int]] = (),
) -> Tensor:  # (rows, outputs), or half of them if gated
    """Return x times a matrix; one row by a kernel where there is one, several by another where that is on.

    They read the matrix while the kernel launched just before may still run, which must not write it.

    Args:
        norm: weight of an RMS norm of x, with ``eps``.
        residual: is added to the result.
        gated: the matrix has the outputs of a gate, then as many values; the result is silu(gate) * values.
        parts: outputs and inputs of each part of x, up to three, if x consists of the inputs of several layers. The
            matrix has their weights one below the other; those with fewer inputs end with zeros.
    """
    below = [sum(size for size, _ in parts[:place]) for place in range(1, len(parts))]
    beside = [sum(size for _, size in parts[:place]) for place in range(1, len(parts))]
    if can_launch(x) and _is_readable(x, weight, norm, residual):
        added_last = residual is not None and (gated or norm is not None)
        if few_rows.fits(len(x), [] if gated else below, added_last=added_last):
            return few_rows.multiply_rows(x, weight, norm, eps, residual, gated, below, beside)
        if len(x) == 1:
            return multiply_row(x, weight, norm, eps, residual, gated, below, beside)
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm, eps)
    blocks = weight.chunk(2) if gated else weight.tensor_split(below)
    inputs = x.tensor_split(beside, -1) if parts else [x] * len(blocks)
    outputs = [F.linear(part, block[:, : part.shape[-1]]) for part, block in zip(inputs, blocks, strict=True)]
    y = F.silu(outputs[0]) * outputs[1] if gated else torch.cat(outputs, -1)
    return y if residual is None else y + residual


def _is_readable(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Return whether kernels can read these tensors, and no gradient is needed."""
    tensors = [tensor for tensor in (x, weight, *others) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    # a copy of the matrix would still be written when the kernel reads it
    return x.dtype == weight.dtype and weight.is_contiguous()


def can_launch(x: Tensor) -> bool:
    """Return whether kernels that start early can be launched for a tensor on its device and of its type."""
    return INTERPRETED or (x.is_cuda and x.dtype in DTYPES and _is_capable(x.device.index))


@kept_by_compiler
def _is_capable(device: int) -> bool:
    return triton_capability(device) == CAPABILITY


@torch.library.custom_op("factorized::multiply_row", mutates_args=())
def multiply_row(
    x: Tensor,  # (1, width)
    weight: Tensor,  # contiguous
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    below: Sequence[int],  # where the outputs of each part of x but the first begin
    beside: Sequence[int],  # where each part of x but the first begins
) -> Tensor:
    """Do what ``multiply`` does by the kernel."""
    from factorized.nn.one_row_kernel import row_kernel

    x, cuda = x.contiguous(), x.is_cuda
    outputs, inputs = len(weight) // (2 if gated else 1), weight.shape[1]
    y = x.new_empty(1, outputs)
    programs = PROGRAMS * processors(x.device) if cuda else 2
    tile, block = tile_sizes(outputs, inputs, [] if gated else below, programs)
    settings = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True} if cuda else {}
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        row_kernel[(min(programs, math.ceil(outputs / tile)),)](
            x,
            weight,
            x if norm is None else norm,
            x if residual is None else residual.contiguous(),
            y,
            eps,
            *(x.shape[1], inputs, outputs, *(*below, outputs, outputs)[:2], *(*beside, 0, 0)[:2]),
            *(norm is not None, residual is not None, int(gated), tile, block),
            EARLY=cuda,
            **settings,
        )
    return y


@multiply_row.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    below: Sequence[int],
    beside: Sequence[int],
) -> Tensor:
    return x.new_empty(1, len(weight) // (2 if gated else 1))


def tile_sizes(outputs: int, inputs: int, begins: Sequence[int], programs: int) -> tuple[int, int]:
    """Return the outputs and inputs of a tile with which the slowest program has the least to read.

    No tile has outputs of two parts, which begin at ``begins``.
    """
    block = min(2 ** (inputs - 1).bit_length(), BLOCK)
    found = []
    size = 1
    while size == 1 or size * block <= ELEMENTS:
        if all(begin % size == 0 for begin in begins):
            blocks = math.ceil(math.ceil(outputs / size) / programs) * math.ceil(inputs / block)
            found.append((blocks * (size * block + LATENCY), size))
        size *= 2
    return min(found)[1], block
