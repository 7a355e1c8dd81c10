"""What the kill tests start in processes of their own, to be killed at any moment."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import factorized as fz
from factorized.experiments.cli.main import main
from factorized.experiments.training.state import FILE

LENGTH = 60  # epochs of the run: long enough that no process of the test trains it in one go


def train(folder: Path, length: int = LENGTH) -> None:
    """Train a small run, or go on with it, to its end; leave with its exit code."""
    torch.set_num_threads(1)
    words = ["train", "digits/resnet8-lowrank-0.1-si-fd", "--data", str(folder.parent / "few.npz"), "--quiet"]
    words += ["--out", str(folder), "--set", f"schedule.epochs={length}", "--set", "run.batch=64", "--device", "cpu"]
    begun = next(folder.glob(f"**/{FILE}"), None) is not None
    os._exit(main([*words, "--resume" if begun else "--overwrite"]))


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 10))


def filled(value: int) -> nn.Module:
    """Return a factorized model of which every parameter is ``value``."""
    model = fz.factorize(dense(), rank=64, init="default")
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save_again_and_again(folder: Path, first: int) -> None:
    """Save models filled with ``first``, ``first + 1`` and so on, until somebody kills this process."""
    torch.set_num_threads(1)
    model = filled(first)
    while True:
        fz.save(model, folder)
        for parameter in model.parameters():
            parameter.data += 1
