"""``help(fz.name)`` is enough to use a public name: it has an example that runs, its arguments and its errors."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import factorized as fz
from factorized import testing

PUBLIC = {
    **{f"fz.{name}": getattr(fz, name) for name in fz.__all__ if name != "__version__"},
    **{f"fz.integrations.{name}": getattr(fz.integrations, name) for name in dir(fz.integrations)},
    **{f"factorized.testing.{name}": getattr(testing, name) for name in ("Case", "LayerContract")},
}
FUNCTIONS = [name for name, public in PUBLIC.items() if inspect.isfunction(public)]


@pytest.mark.filterwarnings("ignore")  # of other packages: Lightning's loggers, torch's meshes
@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")  # tables are as wide as the terminal
    if name.endswith("wiseParallel"):
        request.getfixturevalue("eight_processes")
    torch.manual_seed(0)
    names = {"fz": fz, "torch": torch, "nn": nn}  # as the docstring of the package says
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(PUBLIC[name], name, globs=names)
    assert example.examples, f"{name} has no example"
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    assert report == [], "".join(report)


def described(name: str) -> set[str]:
    """Return the arguments or fields that a docstring lists, or names in its text."""
    text = inspect.getdoc(PUBLIC[name]) or ""
    return set(re.findall(r"^    (\w+): ", text, flags=re.MULTILINE)) | set(re.findall(r"``(\w+)", text))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_names_its_arguments_and_its_errors(name: str) -> None:
    assert "Raises:" in (inspect.getdoc(PUBLIC[name]) or "")
    assert [
        argument for argument in inspect.signature(PUBLIC[name]).parameters if argument not in described(name)
    ] == []


@pytest.mark.parametrize("name", [name for name, public in PUBLIC.items() if dataclasses.is_dataclass(public)])
def test_a_class_of_fields_explains_each_of_them(name: str) -> None:
    assert [field.name for field in dataclasses.fields(PUBLIC[name]) if field.name not in described(name)] == []
