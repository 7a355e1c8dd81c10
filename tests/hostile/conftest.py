"""The folder that all of these tests copy or damage, made once."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.hostile.place import make_place


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    with contextlib.chdir(folder):
        make_place(folder)
    return folder
