"""Time Frobenius decay of all layers of the paper's networks: by the kernels, and by torch's operations.

    python -m benchmarks.decay_kernels --out benchmarks/results/decay-kernels-h200.json

The decay adds to gradients, without a training step around it; on a GPU it is one CUDA graph. Times are medians of
interleaved rounds, in microseconds. Launches are those of the graph. Errors are the largest of any factor's gradient
against float64, relative to its norm. ``--tiles 32,64,16,4 32,128,32,8`` compares sizes of the kernels' tiles, in the
order of ``factorized.decay.fused.Tiles``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import factorized as fz
from benchmarks.script import parser_of, write
from factorized.decay.arena import Arena
from factorized.decay.engine import Worker
from factorized.decay.forms import Form
from factorized.decay.fused import TILES, Fused, Products, Tiles
from factorized.decay.plain import Pair, Plain
from factorized.experiments.models.resnet import resnet, resnet32x2
from factorized.experiments.models.vgg import vgg19_nfc
from factorized.experiments.models.wide_resnet import wide_resnet
from factorized.nn.timing import Step, capture, median_milliseconds

STRENGTH = 1e-4
NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], float]] = {
    "VGG-19": (vgg19_nfc, 0.1),
    "ResNet-32x2": (resnet32x2, 0.1),
    "WideResNet-28-10": (wide_resnet, 0.0667),
    "ResNet-8": (lambda: resnet(8), 0.4),
}
Make = Callable[[Sequence[Form]], list[Worker]]


def ways_of(device: torch.device, tiles: Sequence[Tiles]) -> dict[str, Make | None]:
    """Return how the products are computed in each way; None is the library's choice."""
    ways: dict[str, Make | None] = {
        "library": None,
        "padded batches of torch": lambda found: [Plain([Arena(found)])],
        "one product after the other": lambda found: [Pair([form]) for form in found],
    }
    if device.type == "cuda":
        ways |= {
            "tiles " + ",".join(map(str, sizes)): lambda found, sizes=sizes: [_fused(found, sizes)] for sizes in tiles
        }
    return ways


def _fused(found: Sequence[Form], tiles: Tiles) -> Worker:
    worker = Fused(found)
    worker.launches = [Products([factor.parameter for factor in worker.factors], tiles)]
    return worker


def measure(name: str, device: torch.device, tiles: Sequence[Tiles], rounds: int) -> list[dict[str, Any]]:
    """Return a row for every way of decaying a network."""
    build, ratio = NETWORKS[name]
    torch.manual_seed(0)
    model = fz.factorize(build().to(device), ratio=ratio, init="kaiming")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for way, make in ways_of(device, tiles).items():
        decay = fz.FrobeniusDecay(model, STRENGTH)
        if make is not None:
            decay._engine.workers = make(decay.forms)
        workers = sorted({type(worker).__name__ for worker in decay._engine.workers})
        rows[way] = {"network": name, "ratio": ratio, "products": len(decay.forms), "way": way, "workers": workers}
        rows[way]["error"] = error_of(model, decay)
        steps[way] = capture(decay.apply_) if device.type == "cuda" else decay.apply_
        rows[way]["launches"] = launches(steps[way]) if device.type == "cuda" else None
    times = median_milliseconds(steps, device.type == "cuda", rounds, repeats=20)
    return [{**row, "us": round(1000 * times[way], 2)} for way, row in rows.items()]


def error_of(model: nn.Module, decay: fz.FrobeniusDecay) -> float:
    """Return the largest relative error, by factor, of the gradients that a decay adds to zeros."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()  # in place: graphs that were captured before write to it, too
    decay.apply_()
    errors = []
    for form in decay.forms:
        U, V = (factor.parameter.detach().double() for factor in form.factors)
        for factor, exact in zip(form.factors, (U @ (V.mT @ V), V @ (U.mT @ U)), strict=True):
            assert factor.parameter.grad is not None
            added = factor.parameter.grad.double() / STRENGTH
            errors.append(((added - exact).norm() / exact.norm()).item())
    return max(errors)


def launches(step: Step) -> int:
    """Return how many kernels and copies a step has on the GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events() or [])


def main(words: list[str] | None = None) -> None:
    """Parse the command line, time every network in every way and write one JSON file, again after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS)[:3], choices=NETWORKS)
    parser.add_argument("--tiles", nargs="*", default=[], type=lambda word: Tiles(*map(int, word.split(","))))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--device", type=torch.device, default="cuda")
    given = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    for name in given.networks:
        rows += measure(name, given.device, given.tiles, given.rounds)
        for row in rows[-len(ways_of(given.device, given.tiles)) :]:
            print(row, flush=True)
        write(given.out, given.device, rows, tiles=TILES._asdict(), rounds=given.rounds)


if __name__ == "__main__":
    main()
