"""The names of the benchmarks, in a separate file so that shell completion does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from factorized.experiments.bench.session import Session


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: what it measures, and the function that measures it."""

    about: str
    module: str
    function: str

    def load(self) -> Callable[[Session], None]:
        """Import the function."""
        found: Callable[[Session], None] = getattr(
            importlib.import_module(f"factorized.experiments.bench.{self.module}"), self.function
        )
        return found


BENCHMARKS = {
    "training": Benchmark("training steps of the paper's networks, over dense", "networks", "train_networks"),
    "inference": Benchmark("inference of the paper's networks, over dense", "networks", "run_networks"),
    "llama": Benchmark("the training step of a Llama at a rank, with and without decay", "llama", "train_llama"),
    "layers": Benchmark("one layer: ours, a plain pair, tensorly-torch", "layers", "compare_layers"),
    "decay": Benchmark("Frobenius decay: ours, a loop, a penalty by autograd", "decay", "compare_decays"),
    "initialization": Benchmark(
        "spectral initialization: exact, ours, torch.svd_lowrank, peft's PiSSA",
        "initialization",
        "compare_initializations",
    ),
    "growth": Benchmark("how time and memory grow with width, rank, depth, processes", "growth", "measure_growth"),
    "billion": Benchmark("plan, save, load and compose a billion parameters", "billion", "measure_billion"),
}
