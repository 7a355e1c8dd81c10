"""Time low-rank 3×3 convolutions by the library's kernels, by the compiler's products, and dense, on one GPU.

    python -m benchmarks.thin --out benchmarks/results/thin-h200.json

First the kernels are compared with float64. Then come single layers of the paper's networks, forward and backward, each
as one CUDA graph: bf16, channels-last, batch 128. Times are medians of interleaved rounds, in milliseconds.
``factorized bench training`` times whole steps, which run by the kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import factorized as fz
from benchmarks.script import parser_of, write
from factorized.formats import shifted
from factorized.nn.timing import capture, median_milliseconds, training_step

# in, out, stride, input height and width, rank
Case = tuple[int, int, int, int, int]
CASES: list[Case] = [
    (64, 64, 1, 32, 9),
    (64, 64, 1, 32, 2),
    (64, 128, 2, 32, 19),
    (64, 128, 1, 16, 19),
    (128, 128, 1, 16, 18),
    (128, 128, 1, 16, 3),
    (256, 256, 1, 8, 7),
    (160, 160, 1, 32, 15),
    (320, 320, 1, 16, 31),
    (640, 640, 1, 8, 15),
]
ROUNDS, REPEATS = 9, 20  # of each layer


def check(case: Case, batch: int, device: torch.device) -> float:
    """Return the largest error of outputs and gradients against float64, relative to their norm."""
    layer, x = _layer(case, device), _input(case, batch, device)
    with torch.autocast(device.type, torch.bfloat16):
        found = _gradients(layer, x)
    layer.execution = "composed"
    expected = _gradients(layer.double(), x.detach().double())
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def time_layer(case: Case, batch: int, device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of each way."""
    i, o, stride, _, _ = case
    dense = nn.Conv2d(i, o, 3, stride, 1, bias=False, device=device).to(memory_format=torch.channels_last)
    layer, x = _layer(case, device), _input(case, batch, device)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, cache_enabled=False)
    run = capture if device.type == "cuda" else (lambda step: step)
    with autocast():
        steps = {"dense": run(training_step(dense, x)), "kernels": run(training_step(layer, x))}
        torch._dynamo.reset()
        with patch.object(shifted, "kernels_apply", lambda *given: False):
            steps["products"] = training_step(layer, x, compiled=device.type == "cuda")
            steps["products"]()
        times = median_milliseconds(steps, device.type == "cuda", rounds=ROUNDS, repeats=REPEATS)
    return {"case": list(case), **{name: round(time, 4) for name, time in times.items()}}


def _layer(case: Case, device: torch.device) -> fz.FactorizedConv2d:
    i, o, stride, _, rank = case
    return fz.FactorizedConv2d(i, o, 3, rank, stride, 1, bias=False, execution="products", device=device)


def _input(case: Case, batch: int, device: torch.device) -> Tensor:
    x = torch.randn(batch, case[0], case[3], case[3], device=device)
    return x.to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()


def _gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x.requires_grad_()
    y = layer(x)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(y)
    return [y, *torch.autograd.grad(y, (x, *layer.parameters()), gradient)]


def main(words: list[str] | None = None) -> None:
    """Parse the command line, check and time every layer and write one JSON file, again after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layers", type=int, default=len(CASES), help="the first of them")
    parser.add_argument("--device", type=torch.device, default="cuda")
    given = parser.parse_args(words)
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    for case in CASES[: given.layers]:
        error = check(case, min(given.batch, 4), given.device)
        rows.append({**time_layer(case, given.batch, given.device), "error": round(error, 5)})
        print(rows[-1], flush=True)
        write(given.out, given.device, rows, batch=given.batch)


if __name__ == "__main__":
    main()
