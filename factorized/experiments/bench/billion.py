"""Plan, factorize, save, load and compose a model of a billion parameters."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from factorized.experiments.bench.measure import Spread, clock_of, milliseconds
from factorized.experiments.bench.memory import PeakMemory
from factorized.experiments.bench.session import Session
from factorized.files.checkpoint import load, save
from factorized.nn.running import count_parameters
from factorized.planning.planner import plan
from factorized.surgery.compose import compose
from factorized.surgery.factorize import factorize

WIDTH, FEED_FORWARD, LAYERS = 4096, 11008, 5  # 1.01 billion
COPIES = 3  # of the dense weights that are held at once, at most
RATIO = 0.5


def measure_billion(
    session: Session, width: int = WIDTH, feed_forward: int = FEED_FORWARD, layers: int = LAYERS
) -> None:
    """Time each stage once, on the CPU; factors are drawn, not decomposed."""
    with torch.device("meta"):
        empty = decoder(width, feed_forward, layers)
    parameters = count_parameters(empty)
    needed, there = COPIES * 4 * parameters, _memory_of_machine()
    if there is not None and there < needed:
        session.skip(
            f"{parameters:,} parameters",
            f"needs {needed / 2**30:.0f} GiB of memory, and this machine has {there / 2**30:.0f}",
        )
        return
    found: dict[str, Any] = {}
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        stages: dict[str, Callable[[], object]] = {
            "plan, without weights": lambda: plan(empty, ratio=RATIO),
            "build": lambda: decoder(width, feed_forward, layers),
            "plan": lambda: plan(found["build"], ratio=RATIO),
            "factorize": lambda: factorize(found.pop("build"), found["plan"], init="default"),
            "save": lambda: save(found["factorize"], folder),
            "build again": lambda: decoder(width, feed_forward, layers),
            "load": lambda: load(folder, found.pop("build again")),
            "compose": lambda: compose(found.pop("load")),
        }
        group = f"{parameters / 1e9:.2g} billion parameters to {RATIO} of them"
        for stage, work in stages.items():

            def run(stage: str = stage, work: Callable[[], object] = work) -> None:
                found[stage] = work()

            with PeakMemory(cpu) as memory:
                took = milliseconds(run, cpu)
            if stage.startswith("build"):
                continue  # torch draws random numbers
            facts = {"memory": memory.bytes, "parameters": parameters, "clock": clock_of(cpu)}
            session.add([{"group": group, "way": stage, "ms": Spread.of([took]).to_dict(), **facts}])
    session.tell(group)


def decoder(width: int, feed_forward: int, layers: int) -> nn.Module:
    """Return the linear layers of a decoder, which hold nearly all of its parameters."""
    shapes = [(width, width)] * 4 + [(width, feed_forward)] * 2 + [(feed_forward, width)]
    return nn.ModuleList(nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes) for _ in range(layers))


def _memory_of_machine() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # on Windows
        return None
