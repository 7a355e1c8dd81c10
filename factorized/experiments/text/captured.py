"""The forward and backward pass of a training step as one CUDA graph: one launch in place of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from factorized.experiments.text.task import Batch
from factorized.nn.timing import GraphMemory, capture

MOST = 128  # graphs; the pairs of IWSLT-14, of up to 200 tokens, make batches of 122 shapes

Run = Callable[[Batch], Tensor]  # returns the loss, after computing gradients


class CapturedPasses:
    """Replays a pass for batches of few shapes: a graph is captured for each shape when it is first met.

    Graphs share their memory and the gradients that they write. Clipping, decay and the optimizer are left to the
    caller: they read the gradients before the next call.
    """

    def __init__(self, run: Run, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._run, self._parameters, self._device = run, list(parameters), device
        self._memory = GraphMemory() if device.type == "cuda" else None
        self._passes: dict[tuple[torch.Size, ...], CapturedPass] = {}

    def __call__(self, batch: Batch) -> Tensor:  # ()
        """Compute the gradients of a batch and return its loss, which is valid until the next call.

        A batch of a new shape runs without a graph when there are ``MOST`` of them.
        """
        shape = tuple(tensor.shape for tensor in batch.values())
        if shape not in self._passes:
            if len(self._passes) >= MOST:
                return self._run(dict(batch))
            first = next(iter(self._passes.values()), None)
            into = None if first is None else first.gradients
            made = CapturedPass(self._run, batch, self._parameters, self._device, self._memory, into)
            self._passes[shape] = made
        return self._passes[shape](batch)

    def release(self) -> None:
        """Free the memory of the graphs, which cycles of references would keep for a while."""
        for captured in self._passes.values():
            captured.release()
        self._passes.clear()
        for parameter in self._parameters:
            parameter.grad = None


class CapturedPass:
    """Replays the pass that it captured, for batches of the same shape.

    ``into`` are the gradients of another pass, which this one writes in place of its own: a set of gradients for every
    graph would take much memory.
    """

    def __init__(
        self,
        run: Run,
        batch: Batch,
        parameters: list[nn.Parameter],
        device: torch.device,
        memory: GraphMemory | None = None,
        into: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self._run, self._parameters, self._into = run, parameters, into
        self._batch = {name: tensor.to(device, copy=True) for name, tensor in batch.items()}
        self._loss = torch.zeros((), device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # warming up draws dropout
            self._replay: Callable[[], object] | None = capture(self._pass, memory, 3 if into is None else 1)
        made = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        self.gradients = made if into is None else into

    def __call__(self, batch: Batch) -> Tensor:  # ()
        """Compute the gradients of a batch and return its loss."""
        if self._replay is None:
            raise RuntimeError("the captured pass was released; capture another one")
        for name, tensor in batch.items():
            self._batch[name].copy_(tensor, non_blocking=True)
        self._replay()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient  # the optimizer has set it to None, or capturing to a tensor of the graph
        return self._loss

    def release(self) -> None:
        """Let go of the graph and of its gradients."""
        self._replay, self._into, self.gradients = None, None, {}

    def _pass(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._loss = self._run(dict(self._batch))
        if self._into is not None:
            found = [parameter.grad for parameter in self._into if parameter.grad is not None]
            torch._foreach_copy_(list(self._into.values()), found)
