"""Compare ``init=fz.Calibrated`` with spectral initialization of trained networks: accuracy by ratio.

    python -m benchmarks.calibrated --out benchmarks/results/calibrated-cpu.json

Two small networks are trained on the digits, one with biases and one with BatchNorm in their place. Both are factorized
at several ratios, and tested before and after one more epoch with Frobenius decay. They are calibrated on the training
set. Rows are means and deviations over seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import factorized as fz
from factorized.experiments.data.digits import load_digits
from factorized.experiments.data.images import Images
from factorized.experiments.training.record import describe_machine

RATIOS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.08)
LEARNING_RATE, STRENGTH, BATCH = 2e-3, 1e-2, 96
NETWORKS = {"biases": False, "BatchNorm": True}


def network(normalized: bool) -> nn.Sequential:
    """Return three convolutions and two linears, with BatchNorm in the place of biases if ``normalized``."""
    parts: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 1)):
        parts += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=not normalized)]
        parts += [nn.BatchNorm2d(outputs)] if normalized else []
        parts += [nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model: nn.Module, images: Images, epochs: int) -> None:
    """Train with Adam, and Frobenius decay where there are factors."""
    optimizer = torch.optim.Adam(fz.parameter_groups(model, weight_decay=0.0), lr=LEARNING_RATE)
    if fz.forms(model):
        fz.FrobeniusDecay(model, STRENGTH, decoupled=True).attach(optimizer)
    x, y = images.x_train.float() / 255, images.y_train
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Return the share of the test set that is classified correctly, in percent."""
    right = model.eval()(images.x_test.float() / 255).argmax(1) == images.y_test
    return 100 * right.float().mean().item()


def measure(seed: int, images: Images, epochs: int) -> dict[tuple[str, float, str, str], float]:
    """Return the accuracies of one seed by network, ratio, init and whether the model was trained further."""
    found: dict[tuple[str, float, str, str], float] = {}
    for name, normalized in NETWORKS.items():
        torch.manual_seed(seed)
        dense = network(normalized)
        train(dense, images, epochs)
        found[name, 1.0, "dense", "before"] = accuracy(dense, images)
        batches = (images.x_train.float() / 255).split(128)
        for ratio in RATIOS:
            plan = fz.plan(dense, ratio=ratio)
            inits: dict[str, Any] = {"spectral": "spectral", "calibrated": fz.Calibrated(batches)}
            for init, given in inits.items():
                model = fz.factorize(copy.deepcopy(dense), plan, init=given)
                found[name, ratio, init, "before"] = accuracy(model, images)
                torch.manual_seed(seed)
                train(model, images, 1)
                found[name, ratio, init, "after"] = accuracy(model, images)
    return found


def main() -> None:
    """Parse the command line, measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    images = load_digits()
    runs = [measure(seed, images, arguments.epochs) for seed in range(arguments.seeds)]
    rows = [
        {
            **dict(zip(("network", "ratio", "init", "recovery"), key, strict=True)),
            "accuracy": round(mean(run[key] for run in runs), 2),
            "deviation": round(stdev(run[key] for run in runs), 2),
        }
        for key in runs[0]
    ]
    report = {"machine": describe_machine(torch.device("cpu")), "seeds": arguments.seeds, "epochs": arguments.epochs}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**report, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
