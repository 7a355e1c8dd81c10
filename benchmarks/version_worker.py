"""Hold the training step of one recipe and time it when asked; a process of ``benchmarks.versions``.

It imports nothing but the package of the checkout that it times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from factorized.experiments.bench.measure import milliseconds
from factorized.experiments.bench.memory import PeakMemory
from factorized.experiments.bench.networks import training_way
from factorized.experiments.bench.session import Way


def main(
    recipe: str, batch: int, device: torch.device, make: Callable[[str, int, torch.device], Way] = training_way
) -> None:
    """Build a step, tell about it, then time as many steps as each line of the input says."""
    torch.backends.cudnn.benchmark = True
    began = time.perf_counter()
    with PeakMemory(device) as memory:
        way = make(recipe, batch, device)
        way.run()
        memory.restart()
        way.run()
    tell({**way.facts, "memory": memory.bytes, "start_seconds": round(time.perf_counter() - began, 2)})
    for line in sys.stdin:
        tell(milliseconds(way.run, device, int(line)))


def tell(found: object) -> None:
    """Print something to the parent, in a line that no other output begins like."""
    print("@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3]))
