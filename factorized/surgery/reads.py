"""Find layers that a model uses in ways that a lowered layer does not support, from the source of its classes.

A lowered layer is a sequence of plain layers. It has no ``weight``, so code that computes with ``self.dense.weight``
would fail. It takes only an input, so ``self.up(x, output_size)`` would fail too. Such uses are found in the methods
that ``forward`` calls, and in the graphs of modules that ``torch.fx`` traced.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from textwrap import dedent

from torch import nn
from torch.fx import GraphModule

from factorized.nn.model import dotted

PROPERTIES = ("dtype", "device", "isinstance")  # of a weight, shared by all of its factors
CALLED = "called with more than an input"


@dataclass(frozen=True)
class Read:
    """One place that uses a layer, in a method of ``owner`` or, where that is None, in a function."""

    owner: type[nn.Module] | None
    path: str  # dotted, from ``self`` where ``exact``; otherwise the last part, or the container that is looped over
    exact: bool
    what: str  # of the weight, one of PROPERTIES; empty where it is the tensor itself; or CALLED


def weights_read(model: nn.Module, names: list[str]) -> dict[str, set[str]]:
    """Return what ``forward`` reads of the weights of the layers ``names``: see ``Read.what``.

    Classes whose source is not available are assumed to read nothing.
    """
    used = {name: what - {CALLED} for name, what in _used(model, names).items()}
    return {name: what for name, what in used.items() if what}


def called_with_more(model: nn.Module, names: list[str]) -> list[str]:
    """Return those of the layers ``names`` that ``forward`` may call with more than an input."""
    return [name for name, what in _used(model, names).items() if CALLED in what]


def _used(model: nn.Module, names: list[str]) -> dict[str, set[str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    classes = frozenset(cls for module in modules.values() for cls in type(module).__mro__ if _may_read(cls))
    reads = _reads(classes)
    found: dict[str, set[str]] = {}
    for name in names:
        for read in reads:
            if _applies(read, name, modules):
                found.setdefault(name, set()).add(read.what)
    for place, module in modules.items():
        for path, what in _traced_uses(module) if isinstance(module, GraphModule) else ():
            if (name := dotted(place, path)) in names:
                found.setdefault(name, set()).add(what)
    return found


def _traced_uses(module: GraphModule) -> Iterator[tuple[str, str]]:
    """Yield the layers whose weight or bias a graph reads, or that it calls with more than an input; see ``Read``."""
    for node in module.graph.nodes:
        path, _, last = str(node.target).rpartition(".")
        if node.op == "get_attr" and last in ("weight", "bias"):
            yield path, ""
        elif node.op == "call_module" and len(node.args) + len(node.kwargs) > 1:
            yield str(node.target), CALLED


def _may_read(cls: type) -> bool:
    return "forward" in vars(cls) and cls.__module__.partition(".")[0] not in ("torch", "factorized")


def _applies(read: Read, name: str, modules: dict[str, nn.Module]) -> bool:
    parts = name.split(".")
    for depth in range(len(parts)):
        inside = parts[depth:]
        if read.owner is not None and not isinstance(modules.get(".".join(parts[:depth])), read.owner):
            continue
        if ".".join(inside) == read.path if read.exact else read.path in (inside[-1], *_container(inside)):
            return True
    return False


def _container(inside: list[str]) -> list[str]:
    return inside[-2:-1] if inside[-1].isdecimal() else []


@dataclass(frozen=True, eq=False)
class _Function:
    owner: type[nn.Module] | None
    body: ast.FunctionDef
    parents: dict[ast.AST, ast.AST]


@cache
def _reads(classes: frozenset[type[nn.Module]]) -> list[Read]:
    """Return every use of a layer in the functions that the ``forward`` of these classes calls, directly or not."""
    functions: dict[str, list[_Function]] = {}
    for function in _functions(classes):
        functions.setdefault(function.body.name, []).append(function)
    reached: dict[str, list[ast.Call]] = {"forward": []}  # by name, with the calls to it
    waiting = ["forward"]
    while waiting:
        for function in functions.get(waiting.pop(), ()):
            for call in (node for node in ast.walk(function.body) if isinstance(node, ast.Call)):
                called = _last(call.func)
                name = called if called in functions else "forward"  # of a module that is an attribute
                if name not in reached:
                    waiting.append(name)
                reached.setdefault(name, []).append(call)
    return [
        read for name, calls in reached.items() for found in functions.get(name, ()) for read in _reads_in(found, calls)
    ]


def _functions(classes: frozenset[type[nn.Module]]) -> Iterator[_Function]:
    """Yield the methods of the classes, and the functions in their modules."""
    for module in {cls.__module__ for cls in classes}:
        try:
            tree = ast.parse(inspect.getsource(sys.modules[module]))
        except KeyError:
            continue
        except (OSError, TypeError, SyntaxError):
            yield from _one_by_one(module, classes)
            continue
        parents = _parents(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node in tree.body:
                yield _Function(None, node, parents)
            elif isinstance(node, ast.ClassDef):
                for cls in (cls for cls in classes if (cls.__module__, cls.__name__) == (module, node.name)):
                    yield from (
                        _Function(cls, part, parents) for part in node.body if isinstance(part, ast.FunctionDef)
                    )


def _one_by_one(module: str, classes: frozenset[type[nn.Module]]) -> Iterator[_Function]:
    """Yield the same of a module that is not one file: a notebook keeps the source of its functions only."""
    holders = [cls for cls in classes if cls.__module__ == module]
    found = [(cls, value) for cls in holders for value in vars(cls).values()]
    for owner, value in [*found, *((None, value) for value in vars(sys.modules[module]).values())]:
        if not inspect.isfunction(value) or value.__module__ != module:
            continue
        try:
            tree = ast.parse(dedent(inspect.getsource(value)))
        except (OSError, SyntaxError):
            continue
        if isinstance(tree.body[0], ast.FunctionDef):  # not a lambda
            yield _Function(owner, tree.body[0], _parents(tree))


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _reads_in(function: _Function, calls: list[ast.Call]) -> Iterator[Read]:
    for node in ast.walk(function.body):
        if isinstance(node, ast.Attribute) and node.attr in ("weight", "bias") and isinstance(node.ctx, ast.Load):
            what = _what(function.parents[node]) if node.attr == "weight" else ""
            yield from _uses_of(node.value, what, function, calls)
        elif isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > 1:
            yield from _uses_of(node.func, CALLED, function, calls)


def _uses_of(layer: ast.expr, what: str, function: _Function, calls: list[ast.Call]) -> Iterator[Read]:
    """Yield a use of every layer that an expression may be."""
    path = _path(layer)
    if path[:1] == ["self"] and len(path) > 1:
        yield Read(function.owner, ".".join(path[1:]), True, what)
    elif isinstance(layer, ast.Name) and layer.id != "self":
        for name in _may_be(layer.id, function.body, calls):
            yield Read(function.owner if name in _attributes(function.body) else None, name, False, what)
    elif isinstance(layer, (ast.Attribute, ast.Subscript)):
        yield Read(None, _last(layer), False, what)


def _what(parent: ast.AST) -> str:
    """Return which of PROPERTIES of a weight an expression reads; empty if it reads more."""
    if isinstance(parent, ast.Call) and _last(parent.func) == "isinstance":
        return "isinstance"
    return parent.attr if isinstance(parent, ast.Attribute) and parent.attr in PROPERTIES else ""


def _may_be(variable: str, function: ast.FunctionDef, calls: list[ast.Call]) -> set[str]:
    """Return the names of attributes that a variable of ``function``, or its elements, may hold."""
    sources: list[ast.AST] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(_names(target, variable) for target in node.targets):
            sources.append(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)) and _names(node.target, variable):
            sources.append(node.iter)
    if any(argument.arg == variable for argument in (*function.args.args, *function.args.kwonlyargs)):
        sources += [value for call in calls for value in (*call.args, *(k.value for k in call.keywords))]
    return {name for source in sources for name in _attributes(source)}


def _attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _names(target: ast.AST, variable: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == variable for node in ast.walk(target))


def _last(node: ast.AST) -> str:
    """Return the last name of an expression such as ``self.layers[0]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _path(node: ast.AST) -> list[str]:
    """Return the names in an expression such as ``self.mlp.dense``; empty for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = _path(node.value) if isinstance(node, ast.Attribute) else []
    return [*inner, node.attr] if inner and isinstance(node, ast.Attribute) else []
