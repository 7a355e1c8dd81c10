"""Checks of arguments, each in one place; warnings about them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from math import isfinite
from numbers import Integral, Real
from typing import TypeGuard, TypeVar, cast

Given = TypeVar("Given")


def is_whole(value: object, least: int = 1) -> bool:
    """Return whether ``value`` is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if not is_whole(value, least):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number, also one of numpy."""
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def plain_number(value: Given) -> Given:
    """Return a number of numpy as Python's own, and anything else as it is."""
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return cast(Given, int(value) if isinstance(value, Integral) else float(value))


def check_range(
    name: str, value: float, *, least: float | None = None, above: float | None = None, below: float | None = None
) -> None:
    """Raise unless ``value`` is a number within the bounds."""
    bounds = [
        f"{word} {bound}"
        for word, bound in (("of at least", least), ("above", above), ("below", below))
        if bound is not None
    ]
    if not is_number(value) or not (
        (least is None or value >= least) and (above is None or value > above) and (below is None or value < below)
    ):
        raise ValueError(f"{name} must be a number {' and '.join(bounds)}, got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str], remedy: str = "") -> None:
    """Raise unless ``value`` is one of ``choices``; ``remedy`` ends the message."""
    if value not in choices:
        quoted = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be one of {quoted}, got {value!r}{remedy and f'; {remedy}'}")


def warn(message: str) -> None:
    """Warn at the line outside of this package, and of torch's decorators around it, that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("factorized", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
