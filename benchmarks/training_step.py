"""Time a training step of ResNet-32x2, dense and low-rank: forward, backward and SGD, compiled, as one CUDA graph.

    python -m benchmarks.training_step --out benchmarks/results/training-step-h200.json

bf16 autocast, channels-last, batch 128, random images. Times are medians of interleaved rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import factorized as fz
from factorized.experiments.models.resnet import resnet32x2
from factorized.experiments.training.record import describe_machine
from factorized.nn.timing import capture, median_milliseconds

# ratio of parameters, how the layers run, what decays them
VARIANTS = [
    (None, "dense", "weight"),
    (0.1, "composed", "weight"),
    (0.1, "auto", "weight"),
    (0.1, "auto", "frobenius"),
    (0.1, "auto", "loop"),
    (0.02, "auto", "frobenius"),
]


def build(ratio: float | None, execution: str) -> nn.Module:
    """Return the model of one variant, on the GPU."""
    torch.manual_seed(0)
    model: nn.Module = resnet32x2().cuda().to(memory_format=torch.channels_last)
    if ratio is not None:
        model = fz.factorize(model, ratio=ratio)
        for module in model.modules():
            if isinstance(module, fz.FactorizedConv2d):
                module.execution = execution
    return model


def decay_by_loop(model: nn.Module) -> None:
    """Add the Frobenius gradients by four small products per layer, the baseline for ``fz.FrobeniusDecay``."""
    with torch.no_grad():
        for form in fz.forms(model):
            U, V = form.left.parameter, form.right.parameter
            U.grad.add_(U @ (V.mT @ V), alpha=1e-4)
            V.grad.add_(V @ (U.mT @ U), alpha=1e-4)


def whole_step(model: nn.Module, run: nn.Module, decay: str, batch: int) -> Callable[[], object]:
    """Return a captured training step on a fixed batch."""
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    target = torch.randint(0, 10, (batch,), device="cuda")
    groups = model.parameters() if decay == "weight" else fz.parameter_groups(model, 1e-4, decay_norms=True)
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=True)
    if decay == "frobenius":
        fz.FrobeniusDecay(model, 1e-4).attach(optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(run(x), target)
        loss.backward()
        if decay == "loop":
            decay_by_loop(model)
        optimizer.step()

    return capture(step)


def main() -> None:
    """Parse the command line, time every variant and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--eager", action="store_true", help="capture the graph without compiling first")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    steps, models = {}, {}
    for ratio, execution, decay in VARIANTS:
        if (ratio, execution) not in models:
            torch._dynamo.reset()
            model = build(ratio, execution)
            models[ratio, execution] = model, model if arguments.eager else torch.compile(model, fullgraph=True)
        model, run = models[ratio, execution]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        steps[ratio, execution, decay, parameters] = whole_step(model, run, decay, arguments.batch)
        print("captured", ratio, execution, decay, flush=True)
    times = median_milliseconds(steps, cuda=True, rounds=arguments.rounds, repeats=20)
    rows = [
        {"ratio": ratio, "execution": execution, "decay": decay, "parameters": parameters, "ms": round(ms, 3)}
        for (ratio, execution, decay, parameters), ms in times.items()
    ]
    for row in rows:
        print(row)
    report = {
        "machine": describe_machine(torch.device("cuda")),
        "compiled": not arguments.eager,
        "batch": arguments.batch,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**report, "rounds": arguments.rounds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
