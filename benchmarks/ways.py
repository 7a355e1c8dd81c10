"""Time the three ways of running a factorized convolution, forward and backward, against the dense layer.

    python -m benchmarks.ways --out benchmarks/results/ways-cpu.json --batch 32
    python -m benchmarks.ways --out benchmarks/results/ways-h200.json --device cuda --compile

On CUDA each layer runs in bf16 and channels-last, compiled and replayed as a CUDA graph with ``--compile``, eagerly
without; on the CPU in float32, contiguous, eagerly. Times are medians of interleaved rounds, in milliseconds.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.script import parser_of, write
from factorized.nn.conv import FactorizedConv2d
from factorized.nn.timing import median_milliseconds, training_step

# in, out, kernel, stride, input height and width
Case = tuple[int, int, int, int, int]
RESNET_32X2 = [(64, 64, 3, 1, 32), (64, 128, 3, 2, 32), (128, 128, 3, 1, 16), (256, 256, 3, 1, 8), (64, 128, 1, 2, 32)]
WIDE_RESNET = [(160, 160, 3, 1, 32), (320, 320, 3, 1, 16), (640, 640, 3, 1, 8)]
THIN_RESNET = [(16, 16, 3, 1, 32), (32, 32, 3, 1, 16), (64, 64, 3, 1, 8)]
RANK_SCALES = [0.01, 0.05, 0.15, 0.4, 1.0, 3.0]
COMPILED_SCALES = [0.01, 0.05, 0.15]  # compiling a layer takes seconds


def compare(case: Case, scales: list[float], batch: int, device: str, compiled: bool, rounds: int) -> list[dict]:
    """Time one convolution: the dense layer, and every way of running the factorized one at every rank."""
    i, o, k, stride, size = case
    cuda = device == "cuda"
    dense = nn.Conv2d(i, o, k, stride, k // 2, bias=False, device=device)
    x = torch.randn(batch, i, size, size, device=device)
    if cuda:
        dense = dense.to(memory_format=torch.channels_last)
        x = x.to(torch.bfloat16, memory_format=torch.channels_last)
    x.requires_grad_()
    with torch.autocast(device, torch.bfloat16, enabled=cuda, cache_enabled=False):
        steps = {("dense", 0): training_step(dense, x, compiled)}
        for scale in scales:
            rank = max(1, round(scale * o * k))
            choices = FactorizedConv2d.from_dense(dense, rank, init="kaiming").executions
            for execution in (*choices, "auto"):
                layer = FactorizedConv2d.from_dense(dense, rank, init="kaiming", execution=execution)
                steps[execution, rank] = training_step(layer, x, compiled)
        times = median_milliseconds(steps, cuda, rounds, repeats=20 if cuda else 1)
    names = ("in", "out", "kernel", "stride", "size")
    settings = {**dict(zip(names, case, strict=True)), "batch": batch, "compiled": compiled}
    return [{**settings, "execution": key[0], "rank": key[1], "ms": round(ms, 4)} for key, ms in times.items()]


def show(rows: list[dict]) -> None:
    """Print the times of one convolution as multiples of the dense layer's."""
    dense = rows[0]["ms"]
    print(*(rows[0][name] for name in ("in", "out", "kernel", "stride", "size")), f"dense {dense:.3f} ms", flush=True)
    for rank in sorted({row["rank"] for row in rows} - {0}):
        print("   rank", rank, {row["execution"]: round(row["ms"] / dense, 2) for row in rows if row["rank"] == rank})


def main() -> None:
    """Parse the command line, run the comparison and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="compile each layer, and capture it in a CUDA graph")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # every rank is another program
    scales = COMPILED_SCALES if arguments.compile else RANK_SCALES
    rows: list[dict] = []
    for case in RESNET_32X2 + WIDE_RESNET + THIN_RESNET:
        torch._dynamo.reset()
        rows += compare(case, scales, arguments.batch, arguments.device, arguments.compile, arguments.rounds)
        show([row for row in rows if all(row[name] == rows[-1][name] for name in ("in", "out", "kernel", "size"))])
        write(arguments.out, torch.device(arguments.device), rows, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
