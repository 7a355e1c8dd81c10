"""One of several processes that train small recipes together: ``torchrun sharded_worker.py FOLDER``.

The recipes are those of ``CASES``. One run is stopped by a signal to a single process, and resumed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from factorized.experiments.text.train import train_text
from factorized.experiments.text.trainer import TextTrainer
from factorized.experiments.training.interrupt import Interrupted
from tests.experiments.text.small import small

LOW_RANK = ("factorize.scheme=low_rank", "factorize.rank=3", "decay.kind=frobenius", "decay.strength=0.5")
CASES: dict[str, tuple[str, ...]] = {
    "language-adamw": (*LOW_RANK, "optimizer.lr=1e-2", "model.tied=true"),
    "language-sgd": (*LOW_RANK, "optimizer.name=sgd", "optimizer.lr=1e-2"),
    "language-lamb": (*LOW_RANK, "optimizer.name=lamb", "optimizer.lr=1e-2"),
    "language-flambe": (*LOW_RANK, "optimizer.name=flambe", "optimizer.lr=1e-2"),
    "masked-flambe": ("optimizer.name=flambe", "decay.kind=frobenius", "decay.strength=0.5", "data.mask=1.0"),
    "translation-sgd": (*LOW_RANK, "optimizer.name=sgd", "run.accumulate=2", "run.label_smoothing=0.1"),
}
LONGER = ("schedule.updates=24", "run.evaluate_every=12", "run.checkpoint_every=100", *CASES["language-adamw"])


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    try:
        for name, changes in CASES.items():
            train(name.partition("-")[0], folder, name, *changes)
        train("language", folder, "whole", *LONGER)
        stop_and_resume(folder)
    finally:
        dist.destroy_process_group()


def train(task: str, folder: Path, name: str, *changes: str, resume: bool = False) -> None:
    recipe, corpus = small(task, folder / task, *changes, "run.shard=true")
    train_text(recipe, corpus, folder / "sharded" / name, device="cpu", resume=resume)


def stop_and_resume(folder: Path) -> None:
    steps, real = 0, TextTrainer.training_step

    def stopped(self: TextTrainer, *arguments: Any, **keywords: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments, **keywords)

    TextTrainer.training_step = stopped  # type: ignore[method-assign]
    try:
        train("language", folder, "stopped", *LONGER)
    except Interrupted:
        train("language", folder, "stopped", *LONGER, resume=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
