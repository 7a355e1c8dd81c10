"""Compare ``init=fz.Calibrated`` with spectral initialization of trained networks: accuracy by ratio.

    python -m benchmarks.calibrated --out benchmarks/results/calibrated-cpu.json

Two small networks are trained on the digits, one with biases and one with BatchNorm in their place. Both are factorized
at several ratios, and tested before and after one more epoch with Frobenius decay. They are calibrated on the training
set, all layers at once and one after another. Rows are means and deviations over seeds.
"""

from __future__ import annotations

import copy
from itertools import islice
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

import factorized as fz
from benchmarks.script import parser_of, write
from benchmarks.small_networks import Digits

RATIOS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.08)
LEARNING_RATE, STRENGTH = 2e-3, 1e-2
STEPS = 16  # of an epoch
NETWORKS = {"biases": False, "BatchNorm": True}


def train(model: nn.Module, task: Digits, epochs: int) -> None:
    """Train with Adam at a constant rate, and Frobenius decay where there are factors."""
    optimizer = torch.optim.Adam(fz.parameter_groups(model, weight_decay=0.0), lr=LEARNING_RATE)
    if fz.forms(model):
        fz.FrobeniusDecay(model, STRENGTH, decoupled=True).attach(optimizer)
    model.train()
    for x, y in islice(task.training(), epochs * STEPS):
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()


def measure(seed: int, epochs: int) -> dict[tuple[str, float, str, str], float]:
    """Return the accuracies of one seed by network, ratio, init and whether the model was trained further."""
    found: dict[tuple[str, float, str, str], float] = {}
    for name, normalized in NETWORKS.items():
        task = Digits(normalized)
        torch.manual_seed(seed)
        dense = task.build()
        train(dense, task, epochs)
        found[name, 1.0, "dense", "before"] = task.measure(dense)
        for ratio in RATIOS:
            plan = fz.plan(dense, ratio=ratio)
            inits: dict[str, Any] = {
                "spectral": "spectral",
                "calibrated": fz.Calibrated(task.calibration),
                "sequential": fz.Calibrated(task.calibration, sequential=True),
            }
            for init, given in inits.items():
                model = fz.factorize(copy.deepcopy(dense), plan, init=given)
                found[name, ratio, init, "before"] = task.measure(model)
                torch.manual_seed(seed)
                train(model, task, 1)
                found[name, ratio, init, "after"] = task.measure(model)
    return found


def main() -> None:
    """Parse the command line, measure and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    runs = [measure(seed, arguments.epochs) for seed in range(arguments.seeds)]
    rows = [
        {
            **dict(zip(("network", "ratio", "init", "recovery"), key, strict=True)),
            "accuracy": round(mean(run[key] for run in runs), 2),
            "deviation": round(stdev(run[key] for run in runs), 2),
        }
        for key in runs[0]
    ]
    write(arguments.out, torch.device("cpu"), rows, seeds=arguments.seeds, epochs=arguments.epochs)


if __name__ == "__main__":
    main()
