"""Imports of optional packages."""

from __future__ import annotations

import importlib
from typing import Any, Literal

Extra = Literal["vision", "text", "onnx", "cluster"]


def need(module: str, package: str, purpose: str, extra: Extra = "vision") -> Any:
    """Import and return ``module``; if it is not installed, raise and name the extra to install."""
    top = module.split(".")[0]
    try:
        importlib.import_module(top)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise  # it is installed, but one of its own imports is missing
        raise ModuleNotFoundError(not_installed(purpose, package, extra), name=top) from error
    return importlib.import_module(module)


def not_installed(purpose: str, package: str, extra: Extra) -> str:
    """Return the message for a ``purpose`` whose package is not installed."""
    return f"{purpose} needs {package}, which is not installed: {install_command(extra)}"


def install_command(extra: Extra) -> str:
    """Return how to install an extra: the package is installed from a clone, not from an index."""
    return f"run pip install '.[{extra}]' in the folder of your clone"
