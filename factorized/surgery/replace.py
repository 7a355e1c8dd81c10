"""Replacing one module by another."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"  # torch.compile's name for the module inside it, a part of every dotted name in there


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if ``model`` is wrapped for data-parallel training, which synchronizes gradients by parameter."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which would not synchronize new parameters; change the "
            "model first and wrap it afterwards. Nothing was changed"
        )


def replace_module(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Replace the submodule ``name`` by ``new``; return the model, which is ``new`` for the empty name."""
    if not name:
        return new
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    if child == COMPILED:  # torch.compile binds the module it is given: a new one needs a new wrapper
        return replace_module(model, parent, type(holder)(new, holder.dynamo_ctx))
    setattr(holder, child, new)
    return model
