"""Compress trained networks as others do and as this library does: the score by ratio, before and after recovery.

    python -m benchmarks.compression --out benchmarks/results/compression-cpu.json

At every ratio of the parameters of the compressed layers (the first and the last one stay dense), networks are
compressed by truncated SVD, ASVD, SVD-LLM's whitening and magnitude pruning, and by ``fz.Calibrated`` with ranks chosen
by the loss. They are tested as they are, and after a tenth of the original training with ordinary decay of every
parameter and with Frobenius decay of the products. Rows are means over seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

import factorized as fz
from benchmarks.baselines import METHODS, factorized_by, pruned
from benchmarks.small_networks import Decay, Task, tasks
from factorized.experiments.training.record import describe_machine

RATIOS = (0.7, 0.5, 0.3, 0.1)
RECOVERY = 0.1  # of the original training
RATE = 1 / 3  # of its learning rate: the whole of it costs networks that had lost nothing a point or two
DECAYS: tuple[Decay, ...] = ("ordinary", "frobenius")
OURS, PRUNED = "calibrated", "pruning"
Found = dict[tuple[float, str, str], float]  # the score by ratio, method and recovery


def measure(task: Task, seed: int) -> Found:
    """Return the scores of one seed."""
    torch.manual_seed(seed)
    dense = task.build()
    task.train(dense)
    found: Found = {(1.0, "dense", "none"): task.measure(dense)}
    scheme, batches = fz.LowRank("channel"), task.calibration
    calibration = fz.Calibrated(batches, loss=task.loss)
    for ratio in RATIOS:
        even = fz.plan(dense, scheme, ratio=ratio, of="selected", multiple_of=1)
        ours = fz.plan(
            dense, scheme, ratio=ratio, of="selected", multiple_of=1, allocate="spectrum", calibration=calibration
        )
        made: dict[str, nn.Module] = {
            method: factorized_by(method, copy.deepcopy(dense), even, calibration) for method in METHODS
        }
        made[OURS] = fz.factorize(copy.deepcopy(dense), ours, init=calibration)
        for method, model in made.items():
            found[ratio, method, "none"] = task.measure(model)
            for decay in DECAYS:
                trained = copy.deepcopy(model)
                torch.manual_seed(seed)
                task.train(trained, RECOVERY, decay, rate=RATE)
                found[ratio, method, decay] = task.measure(trained)
        sparse = pruned(copy.deepcopy(dense), even)
        found[ratio, PRUNED, "none"] = task.measure(sparse)
        torch.manual_seed(seed)
        task.train(sparse, RECOVERY, "ordinary", rate=RATE)
        found[ratio, PRUNED, "ordinary"] = task.measure(sparse)
        print(task.name, seed, ratio, {key[1:]: round(score, 2) for key, score in found.items() if key[0] == ratio})
    return found


def main() -> None:
    """Parse the command line, measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--language-seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for task in tasks():
        seeds = arguments.language_seeds if task.score == "perplexity" else arguments.seeds
        runs = [measure(task, seed) for seed in range(seeds)]
        for ratio, method, recovery in runs[0]:
            scores = [run[ratio, method, recovery] for run in runs]
            spread = round(stdev(scores), 3) if seeds > 1 else None
            key = {"network": task.name, "ratio": ratio, "method": method, "recovery": recovery}
            rows.append({**key, "score": task.score, "mean": round(mean(scores), 3), "deviation": spread, "n": seeds})
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": describe_machine(torch.device("cpu")), "recovery": RECOVERY, "rate": RATE}
        arguments.out.write_text(json.dumps({**report, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
