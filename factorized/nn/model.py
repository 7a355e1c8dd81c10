"""Checks of a model argument, and all dotted names of its modules and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# The class of a model, which a changed model keeps. Only a model that is itself one layer is returned as another class.
Model = TypeVar("Model", bound=nn.Module)


def check_model(model: object) -> None:
    """Raise unless ``model`` is a module; the message says what to pass instead."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type) and issubclass(model, nn.Module):
        got, remedy = f"the class {model.__name__}", f"make one first: {model.__name__}(...)"
    elif isinstance(model, Mapping):
        got, remedy = f"a {type(model).__name__}", "load a state dict into a model first: model.load_state_dict(...)"
    elif isinstance(model, (list, tuple)):
        got, remedy = f"a {type(model).__name__}", "put several modules into one: nn.ModuleList(...)"
    else:
        simple = model is None or isinstance(model, (str, int, float))
        got, remedy = repr(model) if simple else f"a value of type {type(model).__name__}", "pass the model itself"
    raise ValueError(f"model must be an nn.Module, got {got}; {remedy}")


def check_copyable(model: nn.Module) -> None:
    """Raise where a layer has no sizes yet, or torch cannot copy it: hooks compute a tensor before each forward."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} is not initialized yet; run the model once first")
    for name, module in model.named_modules():
        for part, value in vars(module).items():
            if isinstance(value, Tensor) and not module._parameters.keys().isdisjoint((f"{part}_orig", f"{part}_g")):
                raise ValueError(
                    f"{f'{name}.{part}'.lstrip('.')} is computed by pruning, or by torch's older weight_norm or "
                    "spectral_norm, and such a layer cannot be copied. Make it a parameter again first, by "
                    "torch.nn.utils.prune.remove, remove_weight_norm or remove_spectral_norm"
                )


def listed(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first names, or texts, as a list in a sentence, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(name or "the model" for name in names[:most]) + more


@contextmanager
def named(layer: str) -> Iterator[None]:
    """Put the dotted name of a layer before the message of any ``ValueError`` raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{layer or 'the model'}: {error}") from error


def dotted(prefix: str, name: str) -> str:
    """Return the dotted name of what the module called ``prefix``, empty for the model itself, holds under a name."""
    return f"{prefix}.{name}" if prefix else name


def is_inside(name: str, outer: str) -> bool:
    """Return whether a dotted name is that of a part of the module called ``outer``."""
    return name.startswith(f"{outer}.") or outer == "" != name


def module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module with all of its dotted names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter that a module itself holds under a name; those of scripted modules are not in a dict."""
    return dict(module._parameters).get(name)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every parameter with all of its dotted names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def sharing_memory(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters and buffers that share memory with another one, with the name of that one.

    Those that are parts of one larger tensor, such as the flattened weights of a recurrent network, share none.
    """
    found: dict[Tensor, str] = {}
    spans: dict[torch.device, list[tuple[int, int, str, Tensor]]] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        plain = type(tensor) in (nn.Parameter, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        if plain and (address := tensor.data_ptr()):
            size = tensor.nbytes if tensor.is_contiguous() else 1  # of one with gaps, only the first byte is looked at
            spans.setdefault(tensor.device, []).append((address, address + size, name, tensor))
    for held in spans.values():
        held.sort(key=itemgetter(0))
        _, end, last, widest = held[0]
        for start, own_end, name, tensor in held[1:]:
            if start < end and tensor is not widest:
                found.setdefault(tensor, last)
                found.setdefault(widest, name)
            if own_end > end:
                end, last, widest = own_end, name, tensor
    return found
