"""Four linear layers, the inner two of one shape, behind a convolution; and the same with two of them shared."""

from __future__ import annotations

import torch
from torch import nn


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(i, o) for i, o in ((48, 12), (12, 12), (12, 12), (12, 4))]
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.Flatten(), *linears)


def shared_module() -> nn.Sequential:
    model = stack()
    model[4] = model[3]
    return model


def shared_weight() -> nn.Sequential:
    model = stack()
    model[4].weight = model[3].weight
    return model
