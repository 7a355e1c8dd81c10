"""Timing the forward and backward pass of one layer on its device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

Key = TypeVar("Key", bound=Hashable)
Step = Callable[[], object]


def training_step(layer: nn.Module, x: Tensor, compiled: bool = False) -> Step:
    """Return a function that runs ``layer`` on ``x``, forward and, where anything needs a gradient, backward.

    ``compiled`` compiles the layer and, on CUDA, replays the pass as one graph, as a compiled training loop would.
    """
    run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    inputs = [tensor for tensor in (x, *layer.parameters()) if tensor.requires_grad and torch.is_grad_enabled()]
    with torch.no_grad():
        gradient = torch.randn_like(layer(x))

    def step() -> None:
        y = run(x)
        if inputs:
            torch.autograd.grad(y, inputs, gradient)

    return capture(step) if compiled and x.is_cuda else step


def median_milliseconds(steps: Mapping[Key, Step], cuda: bool, rounds: int = 5, repeats: int = 1) -> dict[Key, float]:
    """Time all steps, interleaved so that a busy moment hits them alike, and return their medians; warms up first."""
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for round_ in range(rounds + 1):
        for key, step in steps.items():
            elapsed = cuda_milliseconds(step, repeats) if cuda else _cpu_milliseconds(step, repeats)
            if round_ > 0:
                times[key].append(elapsed)
    return {key: statistics.median(values) for key, values in times.items()}


class GraphMemory:
    """Memory that several CUDA graphs share. They are replayed one at a time, and overwrite each other's results.

    Only tensors that are still alive when the next graph is captured are not overwritten by that one. All are captured
    on one stream, because the allocator keeps freed memory for the stream that used it.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()


def capture(step: Step, memory: GraphMemory | None = None, warm_ups: int = 3) -> Step:
    """Return ``step`` as one CUDA graph, after warming it up; replay it on the stream that is current now.

    It is captured on the stream of ``memory``; else on the current one, or on a new one where that is the default
    stream. Graphs captured on one stream share the workspaces of cuBLAS, and must not run at the same time.
    """
    current = torch.cuda.current_stream()
    own = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
    stream = own if memory is None else memory.stream
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            step()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=None if memory is None else memory.pool, stream=stream):
        step()

    def replay(keep_alive: Step = step) -> None:  # the graph reads the memory of the step's tensors
        graph.replay()

    return replay


def _cpu_milliseconds(step: Step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) * 1e3 / repeats


def cuda_milliseconds(step: Step, repeats: int) -> float:
    """Return the time of a step on the GPU, the mean of ``repeats``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats
