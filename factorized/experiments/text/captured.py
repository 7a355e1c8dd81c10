"""The forward and backward pass of a training step as one CUDA graph: one launch in place of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from factorized.experiments.text.task import Batch
from factorized.nn.timing import capture


class CapturedPass:
    """Replays the pass that it captured, for batches of the same shape.

    Clipping, decay and the optimizer are left to the caller: they read the gradients that every replay writes anew.
    """

    def __init__(
        self,
        run: Callable[[Batch], Tensor],  # returns the loss, after computing gradients
        batch: Batch,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._run, self._parameters = run, list(parameters)
        self._batch = {name: tensor.to(device, copy=True) for name, tensor in batch.items()}
        self._loss = torch.zeros((), device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # warming up draws dropout
            self._replay: Callable[[], object] | None = capture(self._pass)
        self._gradients = [parameter.grad for parameter in self._parameters]

    def __call__(self, batch: Batch) -> Tensor:  # ()
        """Compute the gradients of a batch and return its loss, which is valid until the next call."""
        if self._replay is None:
            raise RuntimeError("the captured pass was released; capture another one")
        for name, tensor in batch.items():
            self._batch[name].copy_(tensor, non_blocking=True)
        self._replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # the optimizer has set it to None
        return self._loss

    def release(self) -> None:
        """Free the memory of the graph, which a cycle of references would keep for a while."""
        self._replay, self._gradients = None, []
        for parameter in self._parameters:
            parameter.grad = None

    def _pass(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._loss = self._run(dict(self._batch))
