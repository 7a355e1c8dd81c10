"""Chains of matrices for few rows on a GPU, such as those of decoding, in one launch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MOST_ROWS = 8
LATENCY = 8192  # elements that are read while a program waits for its first
FIELDS = 7  # numbers that describe a stage


@dataclass
class Launch:
    """How the kernels are launched."""

    per: int = 2  # programs on each multiprocessor
    warps: int = 8
    elements: int = 32  # of a matrix, for each thread at a time
    mode: str = "one"  # launch for all stages; "each": one for each stage; "overlap": each, started early
    prefetch: bool = True  # into the L2 cache
    ahead: bool = True  # into registers
    cooperative: bool = True
    stages: int = 3  # of the loop over a tile's inputs


LAUNCH = Launch()


class Chain:
    """Products of the same rows with matrices, one after the other, written down first and run together.

    A tensor has a number: inputs first, then the result of each stage.
    """

    def __init__(self, inputs: Sequence[Tensor], eps: float = 0.0) -> None:
        self.inputs, self.eps = list(inputs), eps
        self.stages: list[int] = []

    def add(
        self,
        x: int,
        weight: int,
        *,
        residual: int = -1,
        norm: int = -1,
        gated: bool = False,
        ends: Sequence[int] = (),  # outputs where parts of x end, each of which has rows of the matrix to itself
    ) -> int:
        """Add a stage and return the number of its result."""
        marks = (*ends[:-1], -1, -1)[:2]
        self.stages += [x, weight, residual, norm, int(gated), *marks]
        return len(self.inputs) + len(self.stages) // FIELDS - 1

    def run(self, *wanted: int) -> list[Tensor]:
        """Return the results with these numbers."""
        return run_chain(self.inputs, self.stages, self.eps, [number - len(self.inputs) for number in wanted])


def _outputs(tensors: Sequence[Tensor], stages: Sequence[int]) -> list[int]:
    weights = [(tensors[stages[at + 1]], stages[at + 4]) for at in range(0, len(stages), FIELDS)]
    return [len(weight) // (2 if gated else 1) for weight, gated in weights]


@torch.library.custom_op("factorized::run_chain", mutates_args=())
def run_chain(inputs: Sequence[Tensor], stages: Sequence[int], eps: float, wanted: Sequence[int]) -> list[Tensor]:
    """Run the stages of a ``Chain``."""
    x, settings = inputs[0], LAUNCH
    rows, cuda = len(x), x.is_cuda
    if rows > MOST_ROWS or not (cuda or INTERPRETED):
        return _run_plain(inputs, stages, eps, wanted)
    from factorized.nn.few_rows_kernels import chain_kernel

    inputs = [tensor.contiguous() for tensor in inputs]
    programs = settings.per * (_processors(x.device) if cuda else 2)
    widths = _outputs(inputs, stages)
    tensors = [*inputs, *(x.new_empty(rows, width) for width in widths)]
    table = []
    for place, outputs in enumerate(widths):
        source, weight, residual, norm, gated, *ends = stages[place * FIELDS : (place + 1) * FIELDS]
        marks = tuple(end if end >= 0 else outputs for end in ends)
        width = inputs[source].shape[1] if source < len(inputs) else widths[source - len(inputs)]
        taken = inputs[weight].shape[1]
        given = tuple(end for end in ends if end >= 0)
        tile, block = _tile(outputs, taken, given, rows, programs, settings)
        target = len(inputs) + place
        table.append((source, weight, target, residual, norm, gated, width, taken, outputs, tile, block, *marks))
    if settings.mode == "one" and cuda:
        ranges = [(0, len(table))]
    else:
        ranges = [(stage, stage + 1) for stage in range(len(table))]
    overlap = cuda and settings.mode == "overlap"
    extra: dict[str, Any] = {"num_warps": settings.warps, "num_stages": settings.stages} if cuda else {}
    if overlap:
        extra["launch_pdl"] = True
    if cuda:  # so that all programs run at the same time
        extra["maxnreg"] = min(255, 65536 // (settings.per * settings.warps * 32) // 8 * 8)
    for begin, end in ranges:
        used = programs if end - begin > 1 else min(programs, -(-table[begin][8] // table[begin][9]))
        if end - begin > 1 and settings.cooperative:
            extra["launch_cooperative_grid"] = True
        chain_kernel[(used,)](
            tuple(tensors),
            _flag(x.device, torch.cuda.current_stream().cuda_stream if cuda else 0),
            eps,
            STAGES=tuple(table),
            BEGIN=begin,
            END=end,
            ROWS=rows,
            CHUNKS=settings.warps,
            PREFETCH=settings.prefetch and cuda,
            AHEAD=settings.ahead,
            OVERLAP=overlap,
            **extra,
        )
    return [tensors[len(inputs) + place] for place in wanted]


def _run_plain(inputs: Sequence[Tensor], stages: Sequence[int], eps: float, wanted: Sequence[int]) -> list[Tensor]:
    tensors, widths = list(inputs), _outputs(inputs, stages)
    for place, outputs in enumerate(widths):
        source, weight, residual, norm, gated, *ends = stages[place * FIELDS : (place + 1) * FIELDS]
        x, matrix = tensors[source], tensors[weight]
        if norm >= 0:
            x = F.rms_norm(x, x.shape[-1:], tensors[norm], eps)
        marks = [outputs] if gated else [end for end in ends if end >= 0]
        blocks = matrix.tensor_split(marks)
        parts = x.split(matrix.shape[1], -1) if x.shape[1] > matrix.shape[1] else [x] * len(blocks)
        results = [F.linear(part, block) for part, block in zip(parts, blocks, strict=True)]
        y = F.silu(results[0]) * results[1] if gated else torch.cat(results, -1)
        tensors.append(y + tensors[residual] if residual >= 0 else y)
    return [tensors[len(inputs) + place] for place in wanted]


@run_chain.register_fake
def _(inputs: Sequence[Tensor], stages: Sequence[int], eps: float, wanted: Sequence[int]) -> list[Tensor]:
    widths = _outputs(inputs, stages)
    return [inputs[0].new_empty(len(inputs[0]), widths[place]) for place in wanted]


def _tile(
    outputs: int, inputs: int, ends: tuple[int, ...], rows: int, programs: int, settings: Launch
) -> tuple[int, int]:
    """Return the outputs and inputs of a tile: those with which the slowest program has the least to read."""
    most = settings.elements * settings.warps * 32
    if rows == 1:
        blocks, smallest = [min(2 ** (inputs - 1).bit_length(), 2048)], 1
    else:
        blocks, smallest = [block for block in (512, 256, 128, 64) if block >= 16 * settings.warps], 16
    best: tuple[int, int, int] | None = None
    for block in blocks:
        size = smallest
        while size == smallest or size * block <= most:
            if all(end % size == 0 for end in ends):
                rounds = math.ceil(math.ceil(outputs / size) / programs) * math.ceil(inputs / block)
                cost = rounds * (size * block + LATENCY)
                best = min(best or (cost, size, block), (cost, size, block))
            size *= 2
    if best is None:
        raise ValueError(f"parts of a chain must end at multiples of {smallest} outputs, got {ends}")
    return best[1:]


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _flag(device: torch.device, stream: int) -> Tensor:
    """Return the number on which the programs of a launch wait for each other; one for each stream."""
    return torch.zeros(1, dtype=torch.int32, device=device).view(torch.uint32)
