"""Modules and parameters inside plain Python values, where torch does not register them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def parts_of(value: Any) -> Collection[Any]:
    """Return what a list, tuple, dict, partial, method or function holds; a function, what it has captured."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
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


def held_parameters(value: Any) -> Iterator[nn.Parameter]:
    """Return the parameters that a value is or holds, at any depth."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, nn.Parameter):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            waiting.extend(parts_of(one))
