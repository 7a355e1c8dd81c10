"""Packages that only some data sets need, imported when they are."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, package: str, purpose: str) -> Any:
    """Return ``module``, or say which extra brings it."""
    top = module.split(".")[0]
    try:
        importlib.import_module(top)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise  # it is installed, and misses something itself
        raise ModuleNotFoundError(
            f"{purpose} needs {package}, which is not installed: pip install 'factorized[vision]'", name=top
        ) from error
    return importlib.import_module(module)
