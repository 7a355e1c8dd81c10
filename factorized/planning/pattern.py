"""Patterns that name modules in ``include=`` and ``exclude=``: names, globs and types of layers or of containers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from factorized.nn.model import is_inside

Pattern = str | type[nn.Module]
Modules = Mapping[str, nn.Module]  # all modules of a model by all of their names


def matches(patterns: Sequence[Pattern], names: Iterable[str], modules: Modules) -> bool:
    """Return whether a pattern matches a module by one of its names or its type, or a container around it."""
    places = [place for name in names for place in _places(name)]
    return any(
        fnmatchcase(place, pattern) if isinstance(pattern, str) else isinstance(modules[place], pattern)
        for pattern in patterns
        for place in places
    )


def _places(name: str) -> list[str]:
    """Return the dotted names of a module and of all containers around it, including the model."""
    return [name, *(name[:index] for index, letter in enumerate(name) if letter == "."), ""]


def names_part(patterns: Sequence[Pattern], names: Iterable[str], modules: Modules) -> bool:
    """Return whether a name or glob matches something inside a module, though not the module as a whole."""
    names = list(names)
    for pattern in patterns:
        if isinstance(pattern, str) and not matches([pattern], names, modules):
            inside = (name for name in modules if any(is_inside(name, outer) for outer in names))
            if any(fnmatchcase(name, pattern) for name in inside):
                return True
    return False


def check_patterns(argument: str, patterns: Sequence[Pattern]) -> None:
    """Raise unless an argument is a list of patterns."""
    if isinstance(patterns, (str, type)):
        shown = repr(patterns) if isinstance(patterns, str) else patterns.__name__
        raise ValueError(f"{argument} must be a list of names, globs or module types, got {shown}: write [{shown}]")
    if not all(isinstance(p, (str, type)) for p in patterns):
        raise ValueError(f"{argument} must be a list of names, globs or module types, got {patterns!r}")


def check_matches(
    argument: str,
    patterns: Sequence[Pattern],
    model: nn.Module,
    modules: Modules,
    names: Sequence[str],  # of candidates
    parts: Sequence[str],  # of what is inside them
) -> None:
    """Raise unless every pattern matches a candidate or something inside one."""
    for pattern in patterns:
        if matches([pattern], (*names, *parts), modules):
            continue
        near = difflib.get_close_matches(str(pattern), names, n=3, cutoff=0.4) or names[:3]
        shown = pattern if isinstance(pattern, str) else pattern.__name__
        found = f"its {len(names)} layers include {', '.join(map(repr, near))}" if names else "it has none"
        raise ValueError(f"{argument}={shown!r} matches no layer of {type(model).__name__}; {found}")
