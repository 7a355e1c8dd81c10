"""Packages that only some users need, imported when they do."""

from __future__ import annotations

import importlib
from typing import Any, Literal

Extra = Literal["vision", "text", "onnx"]


def need(module: str, package: str, purpose: str, extra: Extra = "vision") -> Any:
    """Return ``module``, or say which extra of this package brings it."""
    top = module.split(".")[0]
    try:
        importlib.import_module(top)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise  # it is installed, and misses something itself
        raise ModuleNotFoundError(
            f"{purpose} needs {package}, which is not installed: {install_command(extra)}", name=top
        ) from error
    return importlib.import_module(module)


def install_command(extra: Extra) -> str:
    """Return how to install an extra: the package is installed from a clone, not from an index."""
    return f"run pip install '.[{extra}]' in the folder of your clone"
