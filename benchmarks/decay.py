"""Time one application of Frobenius decay to ResNet-32x2 at ratio 0.1 on the CPU, against loops and autograd.

    python -m benchmarks.decay --out benchmarks/results/decay-cpu.json

Times are medians of rounds in which every way comes once, in random order, since each finds the caches as the one
before it left them; in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import factorized as fz
from factorized.layers.base import FactorizedLayer
from factorized.vision.models.resnet import resnet32x2
from factorized.vision.record import describe_machine

STRENGTH = 1e-4
RATIO = 0.1


def ways(model: nn.Module) -> dict[str, Callable[[], None]]:
    """Return the ways of adding the Frobenius gradients, by name."""
    layers = [module for module in model.modules() if isinstance(module, FactorizedLayer)]
    decay = fz.FrobeniusDecay(model, STRENGTH)

    @torch.no_grad()
    def loop() -> None:
        for layer in layers:
            U, V = layer.U, layer.V
            U.grad += STRENGTH * (U @ (V.T @ V))
            V.grad += STRENGTH * (V @ (U.T @ U))

    @torch.no_grad()
    def lean_loop() -> None:
        for layer in layers:
            U, V = layer.U, layer.V
            U.grad.add_(U @ (V.T @ V), alpha=STRENGTH)
            V.grad.add_(V @ (U.T @ U), alpha=STRENGTH)

    def autograd() -> None:
        penalty = STRENGTH / 2 * torch.stack([layer.weight.square().sum() for layer in layers]).sum()
        penalty.backward()

    return {"apply_": decay.apply_, "loop": loop, "lean loop": lean_loop, "autograd": autograd}


def compare(rounds: int) -> list[dict[str, object]]:
    """Time every way, shuffled in every round; return a row for each."""
    torch.manual_seed(0)
    model = fz.factorize(resnet32x2(), ratio=RATIO)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chosen = ways(model)
    times: dict[str, list[float]] = {name: [] for name in chosen}
    order, names = random.Random(0), list(chosen)
    for _ in range(rounds + 10):
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            chosen[name]()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values[10:]) * 1e3 for name, values in times.items()}
    return [
        {"way": name, "ms": round(ms, 3), "apply_over_this": round(medians["apply_"] / ms, 3)}
        for name, ms in medians.items()
    ]


def main() -> None:
    """Parse the command line, run the comparison several times and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = []
    for _ in range(arguments.runs):
        runs.append(compare(arguments.rounds))
        print(runs[-1], flush=True)
    report = {
        "machine": describe_machine(torch.device("cpu")),
        "rounds": arguments.rounds,
        "runs": runs,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
