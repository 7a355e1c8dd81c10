"""Factorized layers in the traces of ``torch.fx``: recorded as calls, as torch's own layers are."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy


def recorded_call(module: nn.Module, *arguments: Any) -> Any:
    """Record a call of ``module`` with arguments of a trace, and return its output there."""
    tracer = next(argument for argument in arguments if isinstance(argument, Proxy)).tracer
    name = _name_in(tracer, module)
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(
            f"{name}: its forward hooks run now, while torch.fx traces the model, and would run again whenever the "
            "result is called; remove them before tracing"
        )
    return tracer.create_proxy("call_module", name, arguments, {})


def recorded_weight(
    module: nn.Module,
    factor: Proxy,  # one of the module's
) -> Any:
    """Record that the trace reads the weight of ``module``."""
    tracer = factor.tracer
    held: Any = tracer.create_proxy("get_attr", _name_in(tracer, module), (), {})
    return held.weight


def _name_in(tracer: Any, module: nn.Module) -> str:
    name: str = tracer.path_of_module(module)
    if not name:
        raise ValueError(
            f"torch.fx records that a {type(module).__name__} is called, which needs a model around it: trace "
            "nn.Sequential(layer)"
        )
    return name
