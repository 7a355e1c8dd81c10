"""Run Triton kernels on the CPU, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

# Triton comes with torch for GPUs only, and its interpreter fails with NumPy 2.4.
needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="needs Triton and NumPy below 2.4, which `make interpreted` installs beside the environment",
)


def run_interpreted(program: str, interpret: bool = True) -> None:
    """Run a program in a process of its own, in which kernels are interpreted or built; fail with what it says."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
