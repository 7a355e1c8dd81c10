"""Whatever is wrong with a command or a file: exit code 2, one line, and nothing lost or changed."""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from factorized.experiments.cli.main import main
from tests.hostile.cases import Case, command_lines, wrong_fields
from tests.hostile.place import contents, copy_place
from tests.hostile.wrong_data import wrong_data
from tests.hostile.wrong_recipes import own_models, wrong_recipes
from tests.hostile.wrong_runs import wrong_checkpoints, wrong_runs

SEED = 13
KINDS = (command_lines, wrong_fields, wrong_recipes, own_models, wrong_data, wrong_runs, wrong_checkpoints)
EACH = 10  # of every kind, in the sample
ROOM = 6 * 2**30  # bytes that a wrong input may take, beside what is mapped already
PATIENCE = 60  # seconds
ROOT = Path(__file__).parents[2]

CASES = {kind.__name__: list(kind()) for kind in KINDS}
ALL = [case for cases in CASES.values() for case in cases]
SAMPLE = [case for cases in CASES.values() for case in random.Random(SEED).sample(cases, EACH)]
FRESH = random.Random(SEED).sample(ALL, 24)


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the folder, as the working folder; what a model of the user's does to the process is undone."""
    folder = copy_place(made, tmp_path / "place")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("FACTORIZED_DATA", raising=False)
    before, state = set(sys.modules), torch.get_rng_state()
    yield folder
    torch.set_rng_state(state)
    for name in set(sys.modules) - before:
        if name.partition(".")[0].startswith("own"):
            del sys.modules[name]


class TookTooLong(BaseException):
    pass


def stop(number: int, frame: FrameType | None) -> None:
    raise TookTooLong


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise MemoryError or `TookTooLong` instead of taking the machine down."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, limits[1]))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def here(words: tuple[str, ...]) -> tuple[object, str]:
    """Run a command in this process, and return its exit code, or what it let through, and its errors."""
    out, errors = io.StringIO(), io.StringIO()
    code: object
    with bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(list(words))
        except BaseException as escaped:
            code = repr(escaped)
    return code, errors.getvalue()


def in_a_fresh_process(words: tuple[str, ...]) -> tuple[object, str]:
    command = [sys.executable, "-m", "factorized", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    return done.returncode, done.stderr


def check(case: Case, place: Path, run=here) -> None:  # type: ignore[no-untyped-def]
    if case.prepare is not None:
        case.prepare(place)
    before = contents(place)
    code, errors = run(case.words)
    shown = " ".join(case.words)[:200]
    assert code == 2, f"{shown}: exit code {code}; {errors}"
    assert errors.startswith("factorized: "), f"{shown}: {errors}"
    assert errors.count("\n") == 1, f"{shown}: {errors}"
    assert "Traceback" not in errors, f"{shown}: {errors}"
    assert "--debug" not in errors, f"an exception nobody expected: {shown}: {errors}"
    assert "[Errno" not in errors, f"a raw message of the system: {shown}: {errors}"
    assert len(errors) < 2000, f"a line that nobody reads: {shown}: {errors[:300]}"
    assert case.says.lower() in errors.lower(), f"{shown}: {errors}"
    after = contents(place)
    assert after == before, f"{shown}: {sorted(set(after.items()) ^ set(before.items()))}; {errors}"


def test_there_are_at_least_five_hundred_different_cases() -> None:
    assert len(ALL) >= 500
    assert len({case.name for case in ALL}) == len(ALL)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_wrong_input_of_the_sample_is_one_line_and_changes_nothing(case: Case, place: Path) -> None:
    check(case, place)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_wrong_input_is_one_line_and_changes_nothing(case: Case, place: Path) -> None:
    check(case, place)


@pytest.mark.parametrize(
    "case", [FRESH[0], *(pytest.param(case, marks=pytest.mark.nightly) for case in FRESH[1:])], ids=str
)
def test_a_wrong_input_is_one_line_in_a_process_of_its_own(case: Case, place: Path) -> None:
    check(case, place, in_a_fresh_process)
