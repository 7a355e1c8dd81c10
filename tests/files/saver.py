"""Run as a process of its own: saves models of growing value into a folder until it is killed, or kills itself.

python tests/files/saver.py FOLDER [FLUSH]

With FLUSH, the process is killed when the first save flushes that file to the disk: 1 the weights, 2 plan.json.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

import torch
from torch import nn

import factorized as fz


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def filled(value: float) -> nn.Module:
    """Return a factorized model whose every parameter is ``value``."""
    model = fz.factorize(dense(), rank=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def kill_at_flush(call: int) -> None:
    calls = itertools.count(1)
    flush = os.fsync

    def killed(descriptor: int) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = killed


if __name__ == "__main__":
    if len(sys.argv) > 2:
        kill_at_flush(int(sys.argv[2]))
    model = filled(0.0)
    for value in itertools.count(1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        fz.save(model, sys.argv[1])
        print(value, flush=True)
