"""Checking that a call left a model, or a folder, as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fail unless ``model`` has the same modules, the same tensors and the same bits afterwards."""
    modules = list(model.named_modules(remove_duplicate=False))
    modes = [module.training for _, module in modules]
    held = [tensor for _, module in modules for tensor in [*module._parameters.values(), *module._buffers.values()]]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    trains = [parameter.requires_grad for parameter in model.parameters()]
    yield
    now = list(model.named_modules(remove_duplicate=False))
    assert [name for name, _ in now] == [name for name, _ in modules]
    assert all(new is old for (_, new), (_, old) in zip(now, modules, strict=True))
    assert [module.training for _, module in now] == modes
    still = [tensor for _, module in now for tensor in [*module._parameters.values(), *module._buffers.values()]]
    assert all(new is old for new, old in zip(still, held, strict=True))
    assert [parameter.requires_grad for parameter in model.parameters()] == trains
    state = model.state_dict()
    assert list(state) == list(values)
    for key, value in values.items():
        assert same_bits(state[key], value), key


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal, NaN to NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and (a.is_meta or torch.equal(a.nan_to_num(7), b.nan_to_num(7)))


def files(folder: Path) -> dict[str, bytes]:
    """Return every file of ``folder`` with its content."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
