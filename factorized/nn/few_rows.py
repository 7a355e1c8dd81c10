"""Chains of matrices for few rows, such as those of decoding: on a GPU all of them in one launch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 8  # of the kernel
CAPABILITY = (9, 0)  # of the GPUs on which it was measured
DTYPES = (torch.bfloat16, torch.float16)
PARTS = 3  # most layers of one input
MULTIPLE = 16  # of the outputs where a part ends
LATENCY = 8192  # elements that are read while a program waits for its first
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs on the CPU, for tests


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


class Stage(NamedTuple):
    """Rows times one matrix. Tensors are given by their numbers in the chain; -1: none."""

    x: int
    weight: int  # (outputs, inputs)
    residual: int  # added to the result
    norm: int  # weight of an RMS norm of x
    gated: int  # 1: the matrix has the outputs of a gate, then as many values; the result is silu(gate) * values
    first_end: int  # outputs where the first part of x ends; each part has rows of the matrix to itself
    second_end: int

    def parts(self) -> list[int]:
        """Return the outputs where a part of x ends, but for the last."""
        return [end for end in (self.first_end, self.second_end) if end >= 0]


class Result(NamedTuple):
    """What a stage of a chain computes."""

    place: int


class Chain:
    """Products of the same rows with matrices, one after the other: written down first, then run together.

    Args:
        eps: of all norms.
    """

    def __init__(self, eps: float = 0.0) -> None:
        self.eps = eps
        self.inputs: list[Tensor] = []
        self._stages: list[Stage] = []  # results have the numbers -2, -3, ... until all inputs are known

    def add(
        self,
        x: Tensor | Result,  # (rows, inputs), or (rows, parts * inputs)
        weight: Tensor,  # (outputs, inputs)
        *,
        residual: Tensor | Result | None = None,
        norm: Tensor | None = None,
        gated: bool = False,
        ends: Sequence[int] = (),
    ) -> Result:  # (rows, outputs), or half of them if gated
        """Add a stage, see ``Stage``; ``ends`` are the outputs where each part of x ends but for the last."""
        first_end, second_end, *_ = *ends, -1, -1
        rows, matrix, added, scale = (self._number(operand) for operand in (x, weight, residual, norm))
        self._stages.append(Stage(rows, matrix, added, scale, int(gated), first_end, second_end))
        return Result(len(self._stages) - 1)

    def run(self, *wanted: Result) -> list[Tensor]:
        """Return these results."""
        places = [result.place for result in wanted]
        stages = [
            stage._replace(x=self._final(stage.x), residual=self._final(stage.residual)) for stage in self._stages
        ]
        if _has_kernel(self.inputs, stages):
            return run_chain(self.inputs, [number for stage in stages for number in stage], self.eps, places)
        results = _run_plain(self.inputs, stages, self.eps)
        return [results[place] for place in places]

    def _number(self, operand: Tensor | Result | None) -> int:
        if operand is None:
            return -1
        if isinstance(operand, Result):
            return -2 - operand.place
        self.inputs.append(operand)
        return len(self.inputs) - 1

    def _final(self, number: int) -> int:
        return len(self.inputs) - 2 - number if number < -1 else number


def _has_kernel(inputs: Sequence[Tensor], stages: Sequence[Stage]) -> bool:
    x = inputs[0]
    if len(x) > MOST_ROWS or any(end % MULTIPLE for stage in stages for end in stage.parts()):
        return False
    if INTERPRETED:
        return True
    if not x.is_cuda or x.dtype not in DTYPES or any(tensor.dtype != x.dtype for tensor in inputs):
        return False
    return _is_capable(x.device.index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_capable(device: int) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) == CAPABILITY


def _run_plain(inputs: Sequence[Tensor], stages: Sequence[Stage], eps: float) -> list[Tensor]:
    tensors = list(inputs)
    for stage in stages:
        x, matrix = tensors[stage.x], tensors[stage.weight]
        if stage.norm >= 0:
            x = F.rms_norm(x, x.shape[-1:], tensors[stage.norm], eps)
        blocks = matrix.chunk(2) if stage.gated else matrix.tensor_split(stage.parts())
        parts = x.split(matrix.shape[1], -1) if x.shape[1] > matrix.shape[1] else [x] * len(blocks)
        products = [F.linear(part, block) for part, block in zip(parts, blocks, strict=True)]
        y = F.silu(products[0]) * products[1] if stage.gated else torch.cat(products, -1)
        tensors.append(y + tensors[stage.residual] if stage.residual >= 0 else y)
    return tensors[len(inputs) :]


@torch.library.custom_op("factorized::run_chain", mutates_args=())
def run_chain(inputs: Sequence[Tensor], stages: Sequence[int], eps: float, wanted: Sequence[int]) -> list[Tensor]:
    """Run the stages of a ``Chain``, given as one list of numbers, by the kernel."""
    from factorized.nn.few_rows_kernels import chain_kernel

    x, settings = inputs[0], LAUNCH
    rows, cuda = len(x), x.is_cuda
    read = _read(stages)
    widths = _widths(inputs, read)
    inputs = [tensor.contiguous() for tensor in inputs]
    tensors = [*inputs, *(x.new_empty(rows, width) for width in widths)]
    programs = settings.per * (_processors(x.device) if cuda else 2)
    table = []
    for place, (stage, outputs) in enumerate(zip(read, widths, strict=True)):
        taken = tensors[stage.weight].shape[1]
        tile = _tile(outputs, taken, stage.parts(), rows, programs, settings)
        ends = (*stage.parts(), outputs, outputs)[:2]
        table.append(
            (
                *(stage.x, stage.weight, len(inputs) + place, stage.residual, stage.norm, stage.gated),
                *(tensors[stage.x].shape[1], taken, outputs, *tile, *ends),
            )
        )
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
        used = programs if end - begin > 1 else min(programs, math.ceil(table[begin][8] / table[begin][9]))
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


@run_chain.register_fake
def _(inputs: Sequence[Tensor], stages: Sequence[int], eps: float, wanted: Sequence[int]) -> list[Tensor]:
    widths = _widths(inputs, _read(stages))
    return [inputs[0].new_empty(len(inputs[0]), widths[place]) for place in wanted]


def _read(stages: Sequence[int]) -> list[Stage]:
    fields = len(Stage._fields)
    return [Stage(*stages[begin : begin + fields]) for begin in range(0, len(stages), fields)]


def _widths(inputs: Sequence[Tensor], stages: Sequence[Stage]) -> list[int]:
    return [len(inputs[stage.weight]) // (2 if stage.gated else 1) for stage in stages]


def _tile(
    outputs: int, inputs: int, ends: Sequence[int], rows: int, programs: int, settings: Launch
) -> tuple[int, int]:
    """Return the outputs and inputs of a tile: those with which the slowest program has the least to read."""
    most = settings.elements * settings.warps * 32
    if rows == 1:
        blocks, smallest = [min(2 ** (inputs - 1).bit_length(), 2048)], 1
    else:
        blocks, smallest = [block for block in (512, 256, 128, 64) if block >= 16 * settings.warps], MULTIPLE
    found = []
    for block in blocks:
        size = smallest
        while size == smallest or size * block <= most:
            if all(end % size == 0 for end in ends):
                rounds = math.ceil(math.ceil(outputs / size) / programs) * math.ceil(inputs / block)
                found.append((rounds * (size * block + LATENCY), size, block))
            size *= 2
    return min(found)[1:]


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _flag(device: torch.device, stream: int) -> Tensor:
    """Return the number on which the programs of a launch wait for each other; one for each stream."""
    return torch.zeros(1, dtype=torch.int32, device=device).view(torch.uint32)
