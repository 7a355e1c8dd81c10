"""``import factorized`` is quick, and its names are there when they are asked for."""

from __future__ import annotations

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
        "print('torch._dynamo' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    first, second, third, compiler = found.stdout.splitlines()
    assert first == "False factorized"
    assert second == "factorized.planning.planner True"
    assert third == f"factorized.formats.product {fz.__version__}"
    assert compiler == "False"  # it takes a second to import


@pytest.mark.parametrize("name", public.__all__)
def test_every_public_name_is_the_very_same_in_the_package(name: str) -> None:
    assert getattr(fz, name) is getattr(public, name)
    assert {name, "integrations"} <= {*dir(fz)}


@pytest.mark.parametrize("name", ["factorise", "__wrapped__", "annotations_of_nothing", "importlib_"])
def test_a_name_that_is_not_there_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'factorized' has no attribute '{name}'"):
        getattr(fz, name)


@pytest.mark.parametrize(
    "name",
    [
        *("FactorizedTrainerMixin", "resize_token_embeddings", "FactorizeCallback", "restore_plan", "on_factorized"),
        *("fuse_decoder", "skip_masks"),
    ],
)
def test_adapters_are_found_without_the_name_of_their_file(name: str) -> None:
    assert getattr(fz.integrations, name).__module__.startswith("factorized.integrations.")
    assert name in dir(fz.integrations)
    with pytest.raises(AttributeError, match=r"module 'factorized\.integrations' has no attribute 'nothing'"):
        _ = fz.integrations.nothing
