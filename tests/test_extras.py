"""Every package that an extra installs is used, and every package that is used is installed by an extra."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = {
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "pytorch-lightning": "pytorch_lightning",
    "pytest-xdist": "xdist",
    "tensorly-torch": "tltorch",
}
# needed by others: transformers' Trainer, torch's ONNX exporter; or run as commands
INDIRECT = {"accelerate", "onnx", "onnxscript", "pytest-xdist", "ruff", "mypy", "basedpyright", "pre-commit"}
INDIRECT |= {"mkdocs-material", "mkdocstrings", "mkdocstrings-python"}  # named in mkdocs.yml
PACKAGES = sorted({re.split(r"[\[<>=]", text)[0] for extra in EXTRAS.values() for text in extra} - {"factorized"})


@pytest.mark.parametrize("package", [package for package in PACKAGES if package not in INDIRECT])
def test_a_package_of_an_extra_is_imported_somewhere(package: str) -> None:
    module = MODULES.get(package, package.replace("-", "_"))
    used = re.compile(rf"(?m)^\s*(import|from) {module}\b|need\(\"{module}[.\"]")
    files = (path for folder in ("factorized", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py"))
    assert any(used.search(path.read_text()) for path in files), f"nothing imports {package}"
