"""CPU threads that a run uses beside its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one CPU thread: more gain nothing for small matrices, and cost a lot where processes share the cores.

    Threads of different processes wait for each other in every decomposition. With three processes of two threads on
    two cores, the singular values of ResNet-32's products took 0.6 to 3 s, and 0.08 s with one thread each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
