"""Run by torchrun in two processes: trains, stops, goes on and fails together. Each process has a folder of its own.

torchrun --nproc-per-node 2 tests/experiments/training/together.py FOLDER [CHANGE...]
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from factorized._torch import leave_process_group
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training import step
from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.step import TrainingStep
from factorized.experiments.training.train import train
from tests.experiments.training import smooth
from tests.experiments.training.small import digits, recipe

STEPS = 32  # in an epoch


def shared_recipe(*changes: str) -> Recipe:
    """A recipe whose result does not depend on the number of processes, but for rounding."""
    network = f"model.name='{smooth.NAME}'"
    return recipe(network, "run.batch=16", "data.crop_padding=2", "data.flip=true", "optimizer.lr=0.02", *changes)


def signal_at(step: int, sender: int) -> None:
    """Let one of the processes be told to stop after a step of its run."""
    original, taken = TrainingStep.__call__, []

    def watched(self: TrainingStep) -> None:
        original(self)
        taken.append(None)
        if len(taken) == step and dist.get_rank() == sender:
            os.kill(os.getpid(), signal.SIGTERM)

    TrainingStep.__call__ = watched  # type: ignore[method-assign]


def watch(module: Any, name: str, seen: list[int], read: Callable[[Any], list[Any]]) -> None:
    """Note a checksum of what ``read`` finds in all that a function returns."""
    original = getattr(module, name)

    def watched(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        if found := read(result):
            seen.append(zlib.crc32(repr(found).encode()))
        return result

    setattr(module, name, watched)


def outcome(folder: Path, *changes: str, resume: bool = False) -> str:
    try:
        train(shared_recipe(*changes), digits(), folder, device="cpu", resume=resume)
    except (Interrupted, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def scenarios(folder: Path, mine: Path, rank: int) -> dict[str, Any]:
    """Return what this process saw; every scenario but the last writes below ``mine``."""
    found = {"whole": outcome(mine / "whole")}
    original = TrainingStep.__call__
    signal_at(STEPS + 3, sender=1)
    found["cut in an epoch"] = outcome(mine / "cut")
    TrainingStep.__call__ = original  # type: ignore[method-assign]
    if rank == 0:
        shutil.copytree(mine / "cut", mine / "to go on alone")
    signal_at(STEPS - 1, sender=0)
    found["cut after an epoch"] = outcome(mine / "epoch")
    TrainingStep.__call__ = original  # type: ignore[method-assign]
    found["resumed"] = outcome(mine / "cut", resume=True)
    crops: list[int] = []
    dropped: list[int] = []
    watch(step, "draw_crops", crops, lambda drawn: [tensor.tolist() for tensor in drawn])
    watch(nn.functional, "dropout", dropped, lambda kept: kept.eq(0).nonzero().tolist() if kept.any() else [])
    dropout = f"model.name='{smooth.WITH_DROPOUT}'"
    found["with dropout"] = outcome(mine / "dropout", dropout)
    found["crops"], found["dropped"] = crops[:], dropped[:]
    signal_at(STEPS + 3, sender=1)
    found["cut with dropout"] = outcome(mine / "cut dropout", dropout)
    TrainingStep.__call__ = original  # type: ignore[method-assign]
    if rank == 0:
        shutil.copytree(mine / "cut dropout", mine / "dropout alone")
    found["resumed with dropout"] = outcome(mine / "cut dropout", dropout, resume=True)
    found["again"] = outcome(mine / "whole")
    found["left"] = str(dist.is_initialized())
    return found


def main() -> None:
    folder, changes, rank = Path(sys.argv[1]), sys.argv[2:], int(os.environ["RANK"])
    torch.set_num_threads(1)
    mine = folder / f"rank-{rank}"
    if changes:  # one run, to be told to stop from outside
        try:
            train(shared_recipe(*changes), digits(), mine, resume="auto")
        except Interrupted as stopped:
            (folder / f"stopped-{rank}").write_text(str(stopped))
            sys.exit(stopped.exit_code)
        return
    dist.init_process_group("gloo")
    found = scenarios(folder, mine, rank)
    leave_process_group()
    found["in groups of its own"] = [outcome(mine / "whole", resume=True) for _ in range(2)]
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
