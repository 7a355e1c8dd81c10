"""Compare ways of choosing ranks for trained networks, all with calibrated factors: the score by ratio.

    python -m benchmarks.ranks --out benchmarks/results/ranks-cpu.json

Ranks are uniform (one rank scale), or chosen by the spectra of the weights, of the outputs, or of the outputs weighed
by their effect on the loss. Nothing is trained after compression. Rows are means and deviations over seeds.
"""

from __future__ import annotations

import copy
from statistics import mean, stdev
from typing import Any

import torch

import factorized as fz
from benchmarks.script import parser_of, write
from benchmarks.small_networks import Task, tasks

RATIOS = {"accuracy": (0.3, 0.2, 0.15, 0.1), "perplexity": (0.9, 0.7, 0.5, 0.3)}


def ways(task: Task) -> dict[str, dict[str, Any]]:
    """Return the arguments of ``fz.plan`` for every way of choosing ranks."""
    batches = task.calibration
    return {
        "uniform": {},
        "weights": {"allocate": "spectrum"},
        "outputs": {"allocate": "spectrum", "calibration": fz.Calibrated(batches)},
        "loss": {"allocate": "spectrum", "calibration": fz.Calibrated(batches, loss=task.loss)},
    }


def measure(task: Task, seed: int) -> dict[tuple[float, str], float]:
    """Return the scores of one seed by ratio and way."""
    torch.manual_seed(seed)
    dense = task.build()
    task.train(dense)
    found = {(1.0, "dense"): task.measure(dense)}
    for ratio in RATIOS[task.score]:
        for name, options in ways(task).items():
            plan = fz.plan(dense, ratio=ratio, **options)
            model = fz.factorize(copy.deepcopy(dense), plan, init=fz.Calibrated(task.calibration))
            found[ratio, name] = task.measure(model)
    return found


def main() -> None:
    """Parse the command line, measure and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for task in tasks():
        runs = [measure(task, seed) for seed in range(arguments.seeds)]
        for ratio, way in runs[0]:
            scores = [run[ratio, way] for run in runs]
            row = {"network": task.name, "ratio": ratio, "ranks": way, "score": task.score}
            rows.append({**row, "mean": round(mean(scores), 3), "deviation": round(stdev(scores), 3)})
    write(arguments.out, torch.device("cpu"), rows, seeds=arguments.seeds)


if __name__ == "__main__":
    main()
