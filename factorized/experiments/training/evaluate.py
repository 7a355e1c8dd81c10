"""Test loss and accuracy of a network on images that live on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.experiments.data.augment import normalize
from factorized.experiments.data.images import Images
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.step import autocast_type
from factorized.nn.running import evaluation_mode
from factorized.nn.timing import capture

BATCH = 1000


class Evaluator:
    """Runs a network over the test images; on a GPU as one CUDA graph, replayed batch after batch."""

    def __init__(self, network: nn.Module, images: Images, precision: torch.dtype, *, graph: bool = True) -> None:
        self.network, self.precision = network, precision
        self.device = next(network.parameters()).device
        self.mean, self.std = (torch.tensor(values, device=self.device) for values in (images.mean, images.std))
        self.x = images.x_test.to(self.device).contiguous(memory_format=torch.channels_last)
        self.y = images.y_test.to(self.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self.start = torch.zeros((), dtype=torch.int64, device=self.device)
        self.whole = len(self.y) // BATCH * BATCH  # images in whole batches
        self.rows = torch.arange(BATCH, device=self.device)
        self._captures = graph and self.device.type == "cuda" and self.whole > 0
        self._batch: Callable[[], object] | None = None

    def __call__(self) -> tuple[float, float]:
        """Return the mean loss and the accuracy in percent; the network is left in the mode it was in."""
        self.begin()
        return self.end()

    def begin(self) -> None:
        """Issue the work; on a GPU nothing waits for it before ``end``."""
        with evaluation_mode(self.network):
            if self._batch is None:  # not sooner: the first training step does not wait for it
                self._batch = capture(self._whole_batch) if self._captures else self._whole_batch
            for count in (self.loss_sum, self.correct, self.start):
                count.zero_()
            for _ in range(self.whole // BATCH):
                self._batch()
            if self.whole < len(self.y):
                self._add(self.x[self.whole :], self.y[self.whole :])

    def end(self) -> tuple[float, float]:
        """Wait for what ``begin`` issued; return the mean loss and the accuracy in percent."""
        return self.loss_sum.item() / len(self.y), 100 * self.correct.item() / len(self.y)

    def _whole_batch(self) -> None:
        rows = self.rows + self.start
        self._add(self.x[rows], self.y[rows])
        self.start += BATCH
        self.start %= self.whole  # a capture warms up past the end

    @torch.no_grad()
    def _add(
        self,
        x: Tensor,  # (n, channels, height, width) uint8
        y: Tensor,  # (n,)
    ) -> None:
        inputs = normalize(x, self.mean, self.std, self.precision).contiguous(memory_format=torch.channels_last)
        with torch.autocast(
            self.device.type, self.precision, enabled=self.precision != torch.float32, cache_enabled=False
        ):
            logits = self.network(inputs).float()
        self.loss_sum += F.cross_entropy(logits, y, reduction="sum")
        self.correct += (logits.argmax(1) == y).sum()


def evaluate_as_trained(recipe: Recipe, network: nn.Module, images: Images) -> tuple[float, float]:
    """Return the loss and the accuracy in percent, computed in the type that a run of the recipe has on this device."""
    precision = autocast_type(recipe.run.precision, next(network.parameters()).device)
    return Evaluator(network, images, precision, graph=False)()
