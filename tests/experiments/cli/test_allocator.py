from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest

from factorized.experiments.cli import allocator
from factorized.experiments.cli.allocator import keep_freed_memory

FAULTS = """
import resource, torch
from factorized.experiments.cli.allocator import keep_freed_memory
kept = {keep} and keep_freed_memory()
def use():
    for _ in range(20):  # the first ones lie beside each other
        torch.ones(2**23)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    monkeypatch.setattr(os, "environ", clean)
    return clean


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux's C library")
@pytest.mark.parametrize("keep", [False, True])
def test_memory_that_was_freed_is_used_again_without_asking_the_system(keep: bool, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", FAULTS.format(keep=keep)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == str(keep)
    assert (int(told[1]) < 8192) == keep  # pages of 4 KiB: 8192 each time, or none


class Library:
    def __init__(self, answer: int) -> None:
        self.answer, self.asked = answer, []  # type: tuple[int, list[tuple[int, int]]]

    def mallopt(self, number: int, value: int) -> int:
        self.asked.append((number, value))
        return self.answer


@pytest.mark.parametrize("answer", [0, 1])
def test_processes_that_are_started_get_the_same_settings(
    answer: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(answer)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert keep_freed_memory() == bool(answer)
    assert library.asked == [(-1, 2**31 - 1), (-4, 0)]
    assert environment["MALLOC_TRIM_THRESHOLD_"] == str(2**31 - 1)
    assert environment["MALLOC_MMAP_MAX_"] == "0"


@pytest.mark.parametrize(
    ("platform", "library", "own"),
    [
        ("linux", Library(1), {"MALLOC_ARENA_MAX": "2"}),
        ("linux", Library(1), {"GLIBC_TUNABLES": "glibc.malloc.check=3"}),
        ("darwin", Library(1), {}),
        ("linux", object(), {}),  # a C library without such a function
    ],
)
def test_what_is_set_otherwise_or_cannot_be_set_stays(
    platform: str, library: Any, own: dict[str, str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.update(own)
    before = dict(environment)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    assert not keep_freed_memory()
    assert environment == before
    assert not getattr(library, "asked", [])
