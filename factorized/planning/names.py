"""All dotted names of what a model holds at several places."""

from __future__ import annotations

from torch import nn


def module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module with all of its dotted names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every parameter with all of its dotted names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names
