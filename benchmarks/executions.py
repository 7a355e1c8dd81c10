"""Time the three executions of a factorized convolution, forward and backward, against the dense layer.

    python benchmarks/executions.py --out benchmarks/results/executions-cpu.json
    python benchmarks/executions.py --device cuda --compile --out benchmarks/results/executions-h200.json

On CUDA each layer runs in bf16, channels-last, captured in a CUDA graph (optionally compiled first) and replayed; on
the CPU in float32, contiguous, eagerly. Times are medians of interleaved repetitions, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.machine import describe_machine
from factorized.layers.conv import FactorizedConv2d

# in, out, kernel, stride, input height and width
RESNET_32X2 = [(64, 64, 3, 1, 32), (64, 128, 3, 2, 32), (128, 128, 3, 1, 16), (256, 256, 3, 1, 8), (64, 128, 1, 2, 32)]
WIDE_RESNET = [(160, 160, 3, 1, 32), (320, 320, 3, 1, 16), (640, 640, 3, 1, 8)]
THIN_RESNET = [(16, 16, 3, 1, 32), (32, 32, 3, 1, 16), (64, 64, 3, 1, 8)]
RANK_SCALES = [0.01, 0.05, 0.15, 0.4, 1.0, 3.0]
COMPILED_SCALES = [0.01, 0.05, 0.15]  # compiling a layer takes seconds


def training_step(layer: nn.Module, x: torch.Tensor, compiled: bool) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass of ``layer``."""
    run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False)
    with autocast, torch.no_grad():
        gradient = torch.randn_like(layer(x))
    inputs = [x, *layer.parameters()]

    def step() -> None:
        with autocast:
            y = run(x)
        torch.autograd.grad(y, inputs, gradient)

    if not x.is_cuda:
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.owner = step  # the graph reads the layer's memory at every replay, so it has to stay alive
    return graph.replay


def milliseconds(step: Callable[[], None], cuda: bool, repeats: int) -> float:
    """Time one batch of repetitions."""
    if cuda:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) * 1e3 / repeats


def compare(
    case: tuple[int, int, int, int, int], scales: list[float], batch: int, device: str, compiled: bool, rounds: int
) -> list[dict]:
    """Time the dense layer and every execution at every rank for one convolution."""
    i, o, k, stride, size = case
    cuda = device == "cuda"
    dense = nn.Conv2d(i, o, k, stride, k // 2, bias=False, device=device)
    x = torch.randn(batch, i, size, size, device=device, requires_grad=True)
    if cuda:
        dense = dense.to(memory_format=torch.channels_last)
        x = x.detach().to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    steps = {("dense", 0): training_step(dense, x, compiled)}
    for scale in scales:
        rank = max(1, round(scale * o * k))
        for execution in FactorizedConv2d.executions:
            layer = FactorizedConv2d.from_dense(dense, rank, init="kaiming", execution=execution)
            steps[execution, rank] = training_step(layer, x, compiled)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for round_ in range(rounds + 1):
        for key, step in steps.items():
            elapsed = milliseconds(step, cuda, repeats=20 if cuda else 1)
            if round_:  # the first round warms up
                times[key].append(elapsed)
    names = ["in", "out", "kernel", "stride", "size"]
    return [
        dict(zip(names, case, strict=True), batch=batch, execution=key[0], rank=key[1], compiled=compiled,
             ms=round(statistics.median(values), 4))
        for key, values in times.items()
    ]  # fmt: skip


def main() -> None:
    """Parse the command line, run the comparison and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="compile each layer as well")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # every rank is another program
    rows: list[dict] = []
    for compiled in [False, True][:: -1 if arguments.compile else 2]:
        for case in RESNET_32X2 + WIDE_RESNET + THIN_RESNET:
            torch._dynamo.reset()
            scales = COMPILED_SCALES if compiled else RANK_SCALES
            new = compare(case, scales, arguments.batch, arguments.device, compiled, arguments.rounds)
            rows += new
            print(case, "compiled" if compiled else "eager", f"dense {new[0]['ms']:.3f} ms", flush=True)
            for rank in sorted({row["rank"] for row in new} - {0}):
                shown = {row["execution"]: round(row["ms"] / new[0]["ms"], 2) for row in new if row["rank"] == rank}
                print("   rank", rank, shown, flush=True)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            report = {"machine": describe_machine(arguments.device), "rounds": arguments.rounds, "rows": rows}
            arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
