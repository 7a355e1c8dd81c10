"""Modules and parameters inside plain Python values, where torch does not register them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import nn


def parts_of(value: Any) -> Collection[Any]:
    """Return what a list, tuple, dict, dataclass, partial, method or function holds; a function, what it has captured.

    Other objects are not searched: an optimizer or a trainer that a model holds lists all of its parameters.
    """
    if isinstance(value, (list, tuple, deque)):
        return value
    if isinstance(value, dict):
        return value.values()
    if has_fields(value):
        return fields_of(value).values()
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        return (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__)  # torch sets attributes on some
    if isinstance(value, CellType):
        try:
            return (value.cell_contents,)
        except ValueError:  # not assigned yet, or deleted
            return ()
    return ()


def has_fields(value: Any) -> bool:
    """Return whether a value is a dataclass or a namespace, which hold their parts by name."""
    is_other = isinstance(value, (type, dict, list, nn.Module))
    return isinstance(value, SimpleNamespace) or (is_dataclass(value) and not is_other)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the parts of a dataclass or a namespace by name; of a dataclass, those that are set."""
    if isinstance(value, SimpleNamespace):
        return vars(value)
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}


def parameters_in(value: Any) -> Iterator[nn.Parameter]:
    """Return the parameters that a value is or holds, at any depth."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, nn.Parameter):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            waiting.extend(parts_of(one))
