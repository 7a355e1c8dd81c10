"""Time what happens from a command to its first training step: imports, network, compilation.

    python -m benchmarks.startup --out benchmarks/results/startup-h200.json

Every recipe is started twice in a process of its own, with an empty cache of compiled programs and with the one that
the first start has filled. Images are random and of CIFAR's size. Times are seconds, one run each: ``first_step`` is
the time from the start of the process to the end of the first step, and the parts that follow it add up to it.
``compile`` is contained in them, and has parts of its own: those of ``COMPILE``, and what torch does not tell.
``tune kernels`` is contained in ``first step`` and not in ``compile``. ``kernels`` are those that the compiler wrote.
``ms_per_step`` is the mean of a hundred steps after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

RECIPES = ("cifar10/resnet32x2", "cifar10/resnet32x2-lowrank-0.1-si-fd")
BEGAN = "STARTUP_BEGAN"  # environment variable of a child: when its parent started it
STEPS = 100
# The parts of making a trainer, each ended by the call of a function of ``training/trainer.py``.
PARTS = {"network": "check_network", "to device": "build_optimizer", "optimizer": "OnDevice", "images": "TrainingStep"}
# The parts of a compilation, by torch's names.
COMPILE = {
    "trace": "bytecode_tracing",
    "gradients": "aot_trace_joint_graph",
    "joint passes": "_recursive_joint_graph_passes",
    "partition": "min_cut_rematerialization_partition",
    "passes": "_recursive_post_grad_passes",
    "lower": "GraphLowering.run",
    "schedule": "Scheduler.__init__",
    "write kernels": "Scheduler.codegen",
    "wait for kernels": "async_compile.wait",
}
TUNE = "CachingAutotuner.benchmark_all_configs"  # measuring kernels of which there are several, in the first step


def start(recipe: str, changes: Sequence[str], images: int, device: str) -> dict[str, Any]:
    """Train one step in this process, and return how long each part took."""
    began = float(os.environ[BEGAN])
    import torch

    marks = {"torch": time.time()}
    from factorized.experiments.data.stand_in import stand_in
    from factorized.experiments.recipes.find import load_recipe
    from factorized.experiments.training import trainer as module
    from factorized.experiments.training.processes import Processes

    marks["imports"] = time.time()
    data = stand_in("noise", 10, 32, 3, images)
    marks["data"] = time.time()
    where = torch.device(device)
    torch.zeros(1, device=where)
    marks["device"] = time.time()

    def wait() -> None:
        if where.type == "cuda":
            torch.cuda.synchronize()

    def ending(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            wait()
            marks[part] = time.time()
            return function(*given)

        return run

    with ExitStack() as stack:
        for part, name in PARTS.items():
            stack.enter_context(patch.object(module, name, ending(part, getattr(module, name))))
        trainer = module.Trainer(load_recipe(recipe, changes), data, Processes(where), 0)
    wait()
    marks["step"] = time.time()
    trainer.source.start(0, 0)
    trainer.step()
    wait()
    marks["first step"] = time.time()
    row: dict[str, Any] = {"recipe": recipe, "first_step": marks["first step"] - began}
    for part, at in marks.items():
        row[part], began = at - began, at
    steps = min(STEPS, trainer.source.steps - 1)
    for _ in range(steps):
        trainer.step()
    wait()
    row["ms_per_step"] = 1e3 * (time.time() - marks["first step"]) / max(1, steps)
    seconds = torch._dynamo.utils.compilation_time_metrics
    row["compile"] = sum(sum(seconds.get(name, [])) for name in ("_compile.compile_inner", "backward._backward_impl"))
    row.update({part: sum(seconds.get(name, [])) for part, name in COMPILE.items()})
    counters = torch._dynamo.utils.counters
    row["tune kernels"] = sum(seconds.get(TUNE, []))
    from torch._inductor import metrics

    row["kernels"] = metrics.generated_kernel_count
    row["graphs"] = counters["stats"]["unique_graphs"]
    row["caches"] = {
        key: value for part in ("aot_autograd", "inductor") for key, value in counters[part].items() if "cache" in key
    }
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


def in_process(words: Sequence[str], cache: Path) -> dict[str, Any]:
    """Return what ``start`` returns in a process of its own that keeps compiled programs in ``cache``."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    environment = {**os.environ, **folders, BEGAN: repr(time.time())}
    command = [sys.executable, "-m", "benchmarks.startup", "--child", *words]
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, start every recipe and write one JSON file, again after each start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--set", action="append", default=[], help="section.field=value, for every recipe")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    if given.child:
        print(json.dumps(start(given.recipes[0], given.set, given.images, given.device)))
        return
    if given.out is None:
        parser.error("--out is needed")
    rows: list[dict[str, Any]] = []
    options = [f"--images={given.images}", f"--device={given.device}", *(f"--set={change}" for change in given.set)]
    for name in given.recipes:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                rows.append({"cache": cache, **in_process([name, *options], Path(folder))})
                print(rows[-1], flush=True)
                given.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
