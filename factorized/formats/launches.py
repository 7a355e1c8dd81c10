"""Launch Triton kernels, and build them beforehand in a thread while torch's compiler works."""

from __future__ import annotations

import atexit
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        """Launch the kernel on the current GPU; the first launch of its kind builds it."""
        self.kernel[(self.programs,)](*self.arguments, **self.constants)

    def build(self) -> None:
        """Build what ``run`` would build, from the types of tensors, which may be on the meta device.

        The kernel goes to Triton's cache in memory, the C code that launches it to the one on the disk.
        """
        from triton.runtime import driver

        built = self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.constants)
        driver.active.launcher_cls(built.src, built.metadata)


def run_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Launch kernels one after another, on ``device``."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current GPU
        for launch in launches:
            launch.run()


@dataclass(frozen=True)
class _Like:
    """The properties of a tensor that a kernel is built for."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Builder:
    """Builds kernels in a thread, which ends when there are none left.

    A kernel that fails here is built by its first launch, which then says what is wrong with it. What comes first is
    built first, by one thread: two would wait for Python's lock, and might build the same kernel.
    """

    def __init__(self) -> None:
        self._lock, self._thread = Lock(), Thread()
        self._asked: set[Hashable] = set()
        self._waiting: deque[tuple[torch.device, Callable[..., Sequence[Launch]], list[Any]]] = deque()
        self._is_working = False

    def ask(self, launches: Callable[..., Sequence[Launch]], device: torch.device, *given: Tensor | Hashable) -> None:
        """Build the kernels of ``launches(*given)``, once; tensors are given to it on the meta device.

        Sizes that are not known while compiling have no kernels yet.
        """
        tensors = [value for value in given if isinstance(value, Tensor)]
        if any(type(extent) is not int for tensor in tensors for extent in tensor.shape):
            return
        parts = [_Like(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value for value in given]
        key = (launches, device, *parts)
        with self._lock:
            if key in self._asked:
                return
            self._asked.add(key)
            self._waiting.append((device, launches, parts))
            if not self._is_working:
                with suppress(ImportError):
                    import_module("triton")  # which the compiler imports too: two threads might see half of a module
                self._is_working = True
                self._thread = Thread(target=self._work, name="building kernels", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until everything is built that was asked for."""
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Build no more, and wait for the kernel under way: a thread that C++ code runs in must not outlive Python."""
        self._waiting.clear()
        self.wait()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_working = False
                    return
                device, launches, parts = self._waiting.popleft()
            try:
                with torch.cuda.device(device):  # Triton builds for the current GPU
                    for launch in launches(*(part.meta() if isinstance(part, _Like) else part for part in parts)):
                        launch.build()
            except Exception:
                log.debug("kernels of %s are left to their first launch", parts, exc_info=True)


builder = Builder()
atexit.register(builder.close)
