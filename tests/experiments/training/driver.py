"""Run in a process of its own, to be killed: trains, or goes on, until it ends.

python tests/experiments/training/driver.py FOLDER THREADS CHANGE...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from factorized.experiments.training.interrupt import Interrupted
from factorized.experiments.training.train import train
from tests.experiments.training.small import digits, recipe


def main() -> None:
    folder, threads, *changes = sys.argv[1:]
    torch.set_num_threads(int(threads))
    try:
        train(recipe(*changes), digits(), Path(folder), device="cpu", resume="auto")
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)


if __name__ == "__main__":
    main()
