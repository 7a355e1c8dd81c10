"""One of several processes that train small recipes together: ``torchrun sharded_worker.py FOLDER``.

The recipes are those of ``CASES``. One run is stopped by a signal to a single process, and resumed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from factorized._torch import leave_process_group
from factorized.experiments.text import masked
from factorized.experiments.text.task import IGNORED
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
    "masked-flambe": ("optimizer.name=flambe", "decay.kind=frobenius", "decay.strength=0.5"),
    "translation-sgd": (*LOW_RANK, "optimizer.name=sgd", "run.accumulate=2", "run.label_smoothing=0.1"),
}
DROPOUT = ("model.dropout=0.1", "schedule.updates=24", "run.evaluate_every=12", "run.checkpoint_every=100")
LONGER = ("schedule.updates=24", "run.evaluate_every=12", "run.checkpoint_every=100", *CASES["language-adamw"])


def mask_every_third(tokens: Tensor, tokenizer: Any, share: float, draws: Any = None) -> dict[str, Tensor]:
    """Stand in for ``mask_tokens``, whose draws depend on how a batch is divided."""
    chosen = torch.arange(tokens.shape[1]).expand_as(tokens) % 3 == 1
    labels = torch.where(chosen, tokens, torch.full_like(tokens, IGNORED))
    return {"input_ids": tokens.masked_fill(chosen, tokenizer.mask_token_id), "labels": labels}


def main(folder: Path) -> None:
    masked.mask_tokens = mask_every_third
    dist.init_process_group("gloo")
    try:
        for name, changes in CASES.items():
            train(name.partition("-")[0], folder, name, *changes)
        train("language", folder, "whole", *LONGER)
        stop_and_resume(folder, "stopped", "language", *LONGER)
        drop_out(folder)
    finally:
        leave_process_group()


def train(task: str, folder: Path, name: str, *changes: str, resume: bool = False) -> None:
    recipe, corpus = small(task, folder / task, *changes, "run.shard=true")
    train_text(recipe, corpus, folder / "sharded" / name, device="cpu", resume=resume)


def stop_and_resume(folder: Path, name: str, task: str, *changes: str) -> None:
    steps, real = 0, TextTrainer.training_step

    def stopped(self: TextTrainer, *arguments: Any, **keywords: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments, **keywords)

    TextTrainer.training_step = stopped  # type: ignore[method-assign]
    try:
        train(task, folder, name, *changes)
    except Interrupted:
        TextTrainer.training_step = real  # type: ignore[method-assign]
        train(task, folder, name, *changes, resume=True)


def drop_out(folder: Path) -> None:
    """Train with dropout, whole and stopped, and note a checksum of the entries that each process drops."""
    real, seen = nn.functional.dropout, []

    def watched(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        kept = real(x, p, training, inplace)
        if training and p:
            seen.append(zlib.crc32(repr(kept.eq(0).nonzero().tolist()).encode()))
        return kept

    nn.functional.dropout = watched
    train("masked", folder, "dropout", *DROPOUT)
    (folder / f"dropped-{dist.get_rank()}.json").write_text(json.dumps(seen))
    stop_and_resume(folder, "dropout stopped", "masked", *DROPOUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
