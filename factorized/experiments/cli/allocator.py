"""Keep the memory of freed tensors in the process, for the next tensors."""

from __future__ import annotations

import ctypes
import os
import sys

# glibc's parameters of ``mallopt``, the environment variables that set them, and their values here
TRIM_THRESHOLD = (-1, "MALLOC_TRIM_THRESHOLD_", 2**31 - 1)  # bytes freed at the end of the heap before any go back
MMAP_MAX = (-4, "MALLOC_MMAP_MAX_", 0)  # tensors that are mapped one by one, and go back at once


def keep_freed_memory() -> bool:
    """Make this process, and those it starts, keep the memory of tensors that are freed; return whether it does.

    On Linux the C library gives large tensors back to the system, which fills their memory with zeros when the next
    ones ask for it: in an image network on a CPU that is as much work as a thin convolution. What a user has set, or
    another C library, stays as it is.
    """
    settings = (TRIM_THRESHOLD, MMAP_MAX)
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    os.environ.update({name: str(value) for _, name, value in settings})
    return [mallopt(number, value) for number, _, value in settings] == [1, 1]
