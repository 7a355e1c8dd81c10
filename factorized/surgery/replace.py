"""Replacing modules by others."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy as shallow_copy
from copy import deepcopy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from factorized.nn.model import Model, module_names
from factorized.nn.unregistered import fields_of, has_fields, parts_of

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

    That is under all of their names, and in plain attributes, lists, tuples, dicts, dataclasses, partials and functions
    of any module, which torch does not register: a model that calls its layers, or methods of them, from there would
    keep calling the old ones.
    """
    for old, names in module_names(model).items():
        if old in new:
            for name in names:
                model = replace_module(model, name, new[old])
    _Follower(new).follow_in(model)
    return model


def copied(model: Model) -> Model:
    """Return a deep copy of ``model`` whose functions have captured the copy's modules: ``deepcopy`` copies none."""
    memo: dict[int, Any] = {}
    copy = deepcopy(model, memo)
    _Follower({module: memo[id(module)] for module in model.modules() if id(module) in memo}).follow_in(copy)
    return copy


class _Follower:
    """Puts new modules in the place of old ones in what a model holds beside its submodules.

    Its lists, dicts and dataclasses are changed in place. A function is replaced by one that has captured the new
    modules, and so are those that it has captured: another copy of the model, which ``deepcopy`` gives the same
    function, goes on with the old ones.
    """

    def __init__(self, new: Mapping[nn.Module, nn.Module]) -> None:
        self.new = new
        self._made: dict[int, tuple[Any, Any]] = {}  # what was changed, by its id, and what it has become

    def follow_in(self, model: nn.Module) -> None:
        """Change what the modules of ``model`` hold."""
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if name != "_modules" and (followed := self.follow(value)) is not value:
                    module.__dict__[name] = followed

    def follow(self, value: Any, *, captured: bool = False) -> Any:
        """Return a value with new modules for old ones."""
        if isinstance(value, nn.Module):
            return self.new.get(value, value)
        if id(value) in self._made:
            return self._made[id(value)][1]
        if not self._holds_old(value, set()):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            owner = self.follow(value.__self__) if isinstance(value.__self__, nn.Module) else value.__self__
            if owner is not value.__self__:
                return getattr(owner, value.__name__, value)  # such as layer.forward
            return MethodType(self.follow(value.__func__), owner)
        if isinstance(value, partial):
            func, arguments, keywords = self.follow((value.func, value.args, value.keywords), captured=True)
            return type(value)(func, *arguments, **keywords)
        if isinstance(value, tuple):
            parts = [self.follow(part, captured=captured) for part in value]
            return getattr(type(value), "_make", tuple)(parts)  # a named tuple stays one
        made = shallow_copy(value) if captured else value
        self._made[id(value)] = value, made
        if has_fields(made):
            for name, part in list(fields_of(made).items()):
                if (followed := self.follow(part, captured=captured)) is not part:
                    object.__setattr__(made, name, followed)  # frozen ones too
            return made
        for key, part in list(made.items() if isinstance(made, dict) else enumerate(made)):
            if (followed := self.follow(part, captured=captured)) is not part:
                made[key] = followed
        return made

    def _holds_old(self, value: Any, seen: set[int]) -> bool:
        if isinstance(value, nn.Module):
            return value in self.new
        parts = parts_of(value)
        if not parts or id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._holds_old(part, seen) for part in parts)

    def _function(self, function: FunctionType) -> FunctionType:
        """Return the function with other captured values and defaults; variables that it shares stay shared."""
        cells = function.__closure__ or ()
        changed = [cell for cell in cells if id(cell) not in self._made and self._holds_old(cell, set())]
        self._made |= {id(cell): (cell, CellType()) for cell in changed}
        closure = tuple([self._made.get(id(cell), (cell, cell))[1] for cell in cells])
        made = FunctionType(function.__code__, function.__globals__, function.__name__, closure=closure or None)
        self._made[id(function)] = function, made  # before its cells are followed, which may hold the function itself
        for cell in changed:
            self._made[id(cell)][1].cell_contents = self.follow(cell.cell_contents, captured=True)
        for name in ("__defaults__", "__kwdefaults__"):
            setattr(made, name, self.follow(getattr(function, name), captured=True))
        for name in ("__doc__", "__module__", "__qualname__", "__annotations__"):
            setattr(made, name, getattr(function, name))
        vars(made).update(vars(function))
        return made
