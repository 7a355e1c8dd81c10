"""A training step in several processes on the CPU: FSDP2 over gloo, each process with its share of the factors."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from factorized._torch import leave_process_group
from factorized.experiments.bench.measure import Spread
from factorized.experiments.bench.stack import Stack

ROUNDS = 5
ROW = "row.json"


def time_processes(stack: Stack, counts: Iterable[int]) -> list[dict[str, Any]]:
    """Return a row for each number of processes: a training step of a low-rank stack, and what each process keeps.

    Every process has its own batch of the same size. Memory is that of parameters, gradients and moments.
    """
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            spawn(_work, (count, stack, folder), nprocs=count)
            rows.append(json.loads((Path(folder) / ROW).read_text()))
    return rows


def _work(number: int, count: int, stack: Stack, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=count)
    model = stack.build(torch.device("cpu"))
    mesh = dist.device_mesh.init_device_mesh("cpu", (count,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = stack.step(model)
    times = []
    for round_ in range(ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        step()
        if round_:
            times.append(1e3 * (time.perf_counter() - began))
    local = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters())
    if number == 0:
        facts = {"group": f"growth with processes: {count}", "way": "low rank", "grows": "processes", "size": count}
        row = {**facts, "ms": Spread.of(times).to_dict(), "memory": 4 * local, "clock": "wall clock"}
        (Path(folder) / ROW).write_text(json.dumps(row))
    dist.barrier()
    leave_process_group()
