"""Hold the training step of one recipe, or of the Llama, and time it when asked; a process of ``benchmarks.versions``.

It imports nothing but the package of the checkout that it times. On a GPU the step of a recipe is compiled, and waits
for a line before cuDNN measures its algorithms: beside other processes it may choose slow ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from factorized.experiments.bench.measure import milliseconds
from factorized.experiments.bench.memory import PeakMemory
from factorized.experiments.bench.networks import training_way
from factorized.experiments.bench.session import Way
from factorized.experiments.training import step as training
from factorized.nn.running import count_parameters


def way_of(name: str, batch: int, device: torch.device) -> Way:
    """Return the training step of a recipe, or of the Llama of ``factorized bench``: llama [low [decay]]."""
    if not name.startswith("llama"):
        return training_way(name, batch, device)
    from factorized.experiments.bench.llama import ON_A_CPU, LlamaSizes, build_llama, llama_step

    on_cuda = device.type == "cuda"
    sizes = LlamaSizes() if on_cuda else ON_A_CPU
    model = build_llama(sizes, sizes.rank if "low" in name else None, device)
    run = torch.compile(model, dynamic=False) if on_cuda else model
    step = llama_step(model, run, sizes, "decay" in name)
    return Way(step, {"parameters": count_parameters(model)})


def capture_in_turn(capture: Callable[..., Any], step: Callable[[], object], *given: Any) -> Any:
    """Compile a step, say so, and capture it once there is a line to read.

    What cuDNN chooses without measuring is kept for later, but apart from what it does where it is not deterministic.
    """
    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic = False, True
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # one for both, because each stream has workspaces of its own
        step()
        torch.cuda.synchronize()
        tell("compiled")
        sys.stdin.readline()
        cudnn.benchmark, cudnn.deterministic = True, False
        captured = capture(step, *given)
    torch.cuda.synchronize()
    return captured


def main(recipe: str, batch: int, device: torch.device, make: Callable[[str, int, torch.device], Way] = way_of) -> None:
    """Build a step, tell about it, then time as many steps as each line of the input says."""
    torch.backends.cudnn.benchmark = True
    training.capture = partial(capture_in_turn, training.capture)
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
