"""Building the CPU kernels of Frobenius decay, and doing without them where that fails."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from factorized.decay import build
from factorized.decay.build import compiler_flags, cpu_kernels, library_path
from tests.decay.native_products import TOLERANCE, error_of_applying, needs_kernels, products


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing was built before, and what a test finds out is forgotten after it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FACTORIZED_NATIVE", raising=False)
    cpu_kernels.cache_clear()
    yield
    cpu_kernels.cache_clear()


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false", "gcc '", "sh -c 'printf \\377 >&2; exit 1'"])
def test_torch_takes_their_place(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(build.sys, "platform", "linux")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with caplog.at_level(logging.INFO, logger="factorized"):
        assert cpu_kernels(torch.float32) is None
    assert "torch's own operations take their place" in caplog.text
    assert error_of_applying(products()) < TOLERANCE[torch.float32]


def test_a_library_that_does_not_load_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "compiler"
    broken.write_text('#!/bin/sh\nfor last; do :; done\necho nonsense > "$last"\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert cpu_kernels(torch.float32) is None
    assert not list((tmp_path / "factorized").iterdir())  # nor kept


def test_a_folder_that_cannot_be_made_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cpu_kernels(torch.float32) is None


def test_a_user_without_a_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert cpu_kernels(torch.float32) is None


@pytest.mark.parametrize(("platform", "capability"), [("darwin", "AVX2"), ("linux", "DEFAULT")])
def test_other_systems_and_processors(
    platform: str, capability: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build.sys, "platform", platform)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cpu_kernels(torch.float32) is None
    assert not list(tmp_path.iterdir())


def test_the_user_can_do_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FACTORIZED_NATIVE", "0")
    assert cpu_kernels(torch.float32) is None
    assert not list(tmp_path.iterdir())
    assert error_of_applying(products()) < TOLERANCE[torch.float32]


@needs_kernels
def test_what_was_built_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cpu_kernels(torch.float32) is not None
    (library,) = (tmp_path / "factorized").iterdir()  # and nothing half written beside it
    assert ctypes.CDLL(str(library)).add_gradients
    cpu_kernels.cache_clear()
    monkeypatch.setenv("CC", "false")
    assert cpu_kernels(torch.float32) is not None
    assert cpu_kernels(torch.float64) is None


@needs_kernels
@pytest.mark.parametrize("kept", [b"", b"\x7fELF\x02 and no more"])
def test_what_was_kept_and_is_broken_is_built_again(kept: bytes) -> None:
    path = library_path(compiler_flags(torch.float32, torch.backends.cpu.get_cpu_capability()))
    path.parent.mkdir()
    path.write_bytes(kept)
    assert cpu_kernels(torch.float32) is not None
    assert path.stat().st_size > 1000


@needs_kernels
def test_a_cache_that_is_named_relatively_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert cpu_kernels(torch.float32) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@needs_kernels
def test_the_compiler_may_bring_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "env LANG=C cc")
    assert cpu_kernels(torch.float64) is not None
