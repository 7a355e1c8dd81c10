"""Building the CPU kernels of Frobenius decay (``kernels.c``) where they are used, once per kind of processor."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("kernels.c")
MAX_RANK = 128  # of a factor: a thread has its Gram matrix on the stack
NUMBERS = {torch.float32: "float", torch.float64: "double"}
VECTORS = {"AVX512": ["-mavx512f", "-mfma"], "AVX2": ["-mavx2", "-mfma"]}  # by what torch says of the processor
SECONDS = 60  # that the compiler may take; it takes less than one

Kernels = Callable[..., None]


@cache
def cpu_kernels(dtype: torch.dtype) -> Kernels | None:
    """Return ``add_gradients`` of the C source; None where it cannot be built, or ``FACTORIZED_NATIVE=0`` says no."""
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or capability not in VECTORS or os.environ.get("FACTORIZED_NATIVE") == "0":
        return None
    try:
        return load_kernels(dtype, capability)
    except Exception as error:  # whatever a compiler that is not there, or a user without a home, leads to
        said = getattr(error, "stderr", None) or error
        logger.info("the decay's CPU kernels cannot be built, torch's own operations take their place: %s", said)
        return None


def load_kernels(dtype: torch.dtype, capability: str) -> Kernels:
    """Return ``add_gradients`` for one type and kind of processor, built now unless it was before."""
    flags = compiler_flags(dtype, capability)
    path = library_path(flags)
    if not path.exists():
        _build(path, flags)
    try:
        library = ctypes.CDLL(str(path))  # torch's OpenMP is loaded already: where it is GNU's, its threads serve here
    except OSError:  # what was kept is broken
        _build(path, flags)
        library = ctypes.CDLL(str(path))
    function = library.add_gradients
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [address, number, address, address, address, ctypes.c_int]
    function.restype = None
    return function


def compiler_flags(dtype: torch.dtype, capability: str) -> list[str]:
    """Return how the kernels are built for one type and kind of processor."""
    flags = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-fopenmp", *VECTORS[capability]]
    return [*flags, f"-DREAL={NUMBERS[dtype]}", f"-DMAX_RANK={MAX_RANK}"]


def library_path(flags: Sequence[str]) -> Path:
    """Return where the kernels built with ``flags`` are kept: among the user's caches."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(named) if Path(named).is_absolute() else Path("~/.cache").expanduser()
    digest = hashlib.sha256(SOURCE.read_bytes() + "\0".join(flags).encode()).hexdigest()[:16]
    return caches / "factorized" / f"decay-{digest}.so"


def _build(path: Path, flags: Sequence[str]) -> None:
    """Compile the kernels to ``path``, which is never seen half written; the compiler is ``$CC``, or ``cc``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [*compiler, *flags, str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        ctypes.CDLL(str(built))  # what does not load is not kept
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.replace(path)
