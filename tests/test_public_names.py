"""``import factorized`` is quick, and its names are there when they are asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import factorized as fz
from factorized import public

ROOT = Path(__file__).parents[1]


def test_importing_the_package_does_not_import_torch_and_using_it_does() -> None:
    code = (
        "import sys, factorized as fz\n"
        "print('torch' in sys.modules, fz.__name__)\n"
        "print(fz.plan.__module__, 'torch' in sys.modules)\n"
        "from factorized import *\n"
        "print(LowRank.__module__, __version__)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    first, second, third = found.stdout.splitlines()
    assert first == "False factorized"
    assert second == "factorized.planning.planner True"
    assert third == f"factorized.formats.product {fz.__version__}"


@pytest.mark.parametrize("name", public.__all__)
def test_every_public_name_is_the_very_same_in_the_package(name: str) -> None:
    assert getattr(fz, name) is getattr(public, name)
    assert name in dir(fz)


@pytest.mark.parametrize("name", ["factorise", "__wrapped__", "annotations_of_nothing", "importlib_"])
def test_a_name_that_is_not_there_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'factorized' has no attribute '{name}'"):
        getattr(fz, name)


@pytest.mark.parametrize(
    "name", ["FactorizedTrainerMixin", "resize_token_embeddings", "FactorizeCallback", "restore_plan", "on_factorized"]
)
def test_adapters_are_found_without_the_name_of_their_file(name: str) -> None:
    assert getattr(fz.integrations, name).__module__.startswith("factorized.integrations.")
    assert name in dir(fz.integrations)
    with pytest.raises(AttributeError, match=r"module 'factorized\.integrations' has no attribute 'nothing'"):
        _ = fz.integrations.nothing


@pytest.mark.nightly  # mypy reads torch's files
def test_a_type_checker_knows_the_public_names_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "uses_it.py").write_text(
        "from torch import nn\n"
        "import factorized as fz\n"
        "reveal_type(fz.plan(nn.Sequential(), fz.LowRank(), ratio=0.1))\n"
        "fz.nothere\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "uses_it.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    revealed, error, summary = found.stdout.splitlines()
    assert revealed.endswith('Revealed type is "factorized.planning.plan.Plan"')
    assert error.startswith('uses_it.py:4: error: Module has no attribute "nothere"')
    assert summary.startswith("Found 1 error")


def test_an_editable_install_writes_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    clone, target = tmp_path / "clone", tmp_path / "installed"
    shutil.copytree(ROOT / "factorized", clone / "factorized")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), "-e", str(clone)], capture_output=True, check=True)
    (path_file,) = target.glob("*.pth")
    assert path_file.read_text().strip() == str(clone)
    assert (clone / "factorized" / "py.typed").is_file()
