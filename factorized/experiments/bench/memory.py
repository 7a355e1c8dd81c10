"""Peak memory: of tensors on a CPU, of torch's allocator on a GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from factorized._torch import WatchingMode


class TensorMemory(WatchingMode):
    """While entered, follows the bytes of all tensors that are made, until they are freed.

    Left out is what torch's and oneDNN's functions take inside, such as reordered weights.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.bytes: dict[int, int] = {}
        self.now = self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._hold(tensor, is_new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._hold(tensor, is_new=True)
        return result

    def _hold(self, tensor: Any, is_new: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.untyped_storage()._cdata in self.bytes:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes() if is_new else 0
        self.bytes[storage._cdata] = size
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.now -= self.bytes.pop(key, 0)


class PeakMemory:
    """A context manager that measures what its block holds at most, beyond what was held before it.

    Call ``restart`` once everything is warm, so that the measurement leaves out what only the first calls need. On a
    GPU memory that a captured graph keeps for its replays counts as held.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors = TensorMemory()

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            self._settle()
            self.allocated, self.reserved = (
                torch.cuda.memory_allocated(self.device),
                torch.cuda.memory_reserved(self.device),
            )
        else:
            self.tensors.__enter__()  # type: ignore[no-untyped-call]  # of torch
        return self

    def restart(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            self._settle()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tensors.peak = self.tensors.now

    def __exit__(self, *exception: Any) -> None:
        if self.device.type != "cuda":
            self.tensors.__exit__(*exception)  # type: ignore[no-untyped-call]  # of torch
            self.bytes = self.tensors.peak
            return
        peak = torch.cuda.max_memory_allocated(self.device) - self.allocated
        self._settle()
        self.bytes = max(peak, torch.cuda.memory_reserved(self.device) - self.reserved)

    def _settle(self) -> None:
        """Free what nothing refers to any more."""
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
