"""Two Ctrl-C close together, at any moment of a command: its words or none, never a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.experiments.cli.conftest import SHORT

ROOT = Path(__file__).parents[3]
TRAIN = ("train", "digits/resnet8", *SHORT, "--set", "run.batch=64", "--device", "cpu")
QUICK = ("--version",)


def interrupt_twice(arguments: tuple[str, ...], wait: float, gap: float) -> tuple[int, str]:
    """Return the exit code and the errors of a command that is interrupted after ``wait`` seconds, and once more."""
    command = [sys.executable, "tests/experiments/cli/interrupted.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for pause in (wait, gap):
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def assert_quiet(arguments: tuple[str, ...], wait: float, gap: float) -> int:
    code, errors = interrupt_twice(arguments, wait, gap)
    told = f"after {wait:.3f} s and {gap:.4f} s more: {code} {errors}"
    assert code in (0, 128 + signal.SIGINT, -signal.SIGINT), told
    assert "Traceback" not in errors, told
    assert "Exception ignored" not in errors, told
    lines = [line for line in errors.splitlines() if not line.startswith("factorized: stopped by ")]
    assert lines == [], told
    return code


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.5, 4.0])
def test_two_interrupts_at_once_leave_no_traceback(tmp_path: Path, wait: float) -> None:
    assert_quiet((*TRAIN, "--out", str(tmp_path)), wait, gap=0.005)


def test_interrupts_at_the_end_of_a_command_leave_no_traceback() -> None:
    for wait in (0.0, 0.1, 0.2, 0.3):
        assert_quiet(QUICK, wait, gap=0.002)


@pytest.mark.nightly
def test_two_interrupts_at_many_moments_leave_no_traceback(tmp_path: Path) -> None:
    chance, codes = random.Random(0), []
    for number in range(40):
        out = ("--out", str(tmp_path / str(number)))
        codes.append(assert_quiet((*TRAIN, *out), chance.uniform(0, 5), chance.choice((0, 0.001, 0.01, 0.1))))
    assert 128 + signal.SIGINT in codes


def test_an_interrupt_where_nobody_can_catch_it_ends_the_process_without_a_traceback() -> None:
    code = (
        "import os, signal\n"
        "from factorized.experiments.training.interrupt import OneInterrupt\n"
        "OneInterrupt().install()\n"
        "class Last:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for _ in range(10**6): pass\n"
        "last = Last()\n"
        "del last\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "factorized: stopped by Ctrl-C\n")


def test_an_interrupt_of_an_import_ends_the_process_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nfinally:\n    print('raised')\n"
    )
    code = "from factorized.experiments.training.interrupt import OneInterrupt; OneInterrupt().install(); import slow"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "factorized: stopped by Ctrl-C\n")
