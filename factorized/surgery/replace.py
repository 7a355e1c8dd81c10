"""Replacing modules by others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from factorized.nn.model import module_names

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


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace the modules that are keys of ``new`` wherever ``model`` holds them; return the model or its replacement.

    That is under all of their names, and in plain attributes, lists, tuples, dicts and partials of any module, which
    torch does not register: a model that calls its layers, or methods of them, from there would keep calling the old
    ones.
    """
    for old, names in module_names(model).items():
        if old in new:
            for name in names:
                model = replace_module(model, name, new[old])
    seen: set[int] = set()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name != "_modules" and (followed := _followed(value, new, seen)) is not value:
                module.__dict__[name] = followed
    return model


def _followed(value: Any, new: Mapping[nn.Module, nn.Module], seen: set[int]) -> Any:
    """Return a value with new modules for old ones; lists and dicts are changed in place, each once."""
    if isinstance(value, nn.Module):
        return new.get(value, value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module) and value.__self__ in new:
        return getattr(new[value.__self__], value.__name__, value)  # such as layer.forward
    if type(value) is partial:
        parts = (value.func, value.args, value.keywords)
        func, arguments, keywords = followed = _followed(parts, new, seen)
        return value if followed is parts else partial(func, *arguments, **keywords)
    if isinstance(value, (list, dict)) and id(value) not in seen:
        seen.add(id(value))
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (followed := _followed(part, new, seen)) is not part:
                value[key] = followed
    elif type(value) is tuple:
        parts = tuple([_followed(part, new, seen) for part in value])
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value
