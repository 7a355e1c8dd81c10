"""Packages that only some data sets need, imported when they are."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, package: str, purpose: str) -> Any:
    """Return ``module``, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise  # it is installed, and misses something itself
        raise ModuleNotFoundError(
            f"{purpose} needs {package}, which is not installed: pip install 'factorized[vision]'", name=error.name
        ) from error
