"""One training step: augmentation, forward, backward, decay and optimizer; on a GPU compiled, and one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from factorized._torch import set_up_compiler
from factorized.diagnostics.match import NormMatcher
from factorized.experiments.data.augment import crop_flip, cut_out, draw_crops, draw_holes, normalize
from factorized.experiments.data.images import Images
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.counters import counted_at_once
from factorized.experiments.training.network import trained_parameters
from factorized.experiments.training.own_numbers import OwnNumbers
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.source import Source
from factorized.nn.timing import capture


class TrainingStep:
    """Takes a batch from its source and trains on it; counts stay on the device, so that no step synchronizes."""

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        optimizer: SGD,
        source: Source,
        images: Images,
        norms: Tensor | None = None,  # (steps of the run, forms): recorded, or to be followed
        processes: Processes | None = None,
    ) -> None:
        self.device = next(network.parameters()).device
        self.recipe, self.network, self.optimizer, self.source = recipe, network, optimizer, source
        self.norms, self.matcher = norms, NormMatcher(network) if norms is not None else None
        self.mean, self.std = (torch.tensor(values, device=self.device) for values in (images.mean, images.std))
        self.precision = autocast_type(recipe.run.precision, self.device)
        self.pad, self.smoothing = recipe.data.crop_padding, recipe.run.label_smoothing
        self.cutout, self.size = recipe.data.cutout, images.size
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self.position = torch.zeros((), dtype=torch.int64, device=self.device)  # steps since the run began
        self._parameters = trained_parameters(optimizer)
        compiled = recipe.run.compile == "yes" or (recipe.run.compile == "auto" and self.device.type == "cuda")
        self._forward: nn.Module = network
        self._loss: Callable[..., tuple[Tensor, Tensor]] = self._loss_and_correct
        processes = processes or Processes(self.device)
        # what the network draws for its share, such as dropout; crops are drawn by all alike
        self.own = OwnNumbers(self.device) if processes.count > 1 else None
        self.share = slice(processes.rank, None, processes.count)  # of a batch, that is trained on here
        if compiled:
            set_up_compiler()
        if processes.count > 1:
            self._forward = DistributedDataParallel(torch.compile(network) if compiled else network)
        elif compiled:
            whole = torch.compile(self._loss_and_correct, fullgraph=True, dynamic=False)
            self._loss = counted_at_once(network)(whole)
        # Measuring convolutions beats cuDNN's guesses: those run thin networks in tf32, with conversions around it.
        torch.backends.cudnn.benchmark = self.device.type == "cuda"
        self._run: Callable[[], object] = self._step
        if self.device.type == "cuda" and recipe.run.graph == "auto" and processes.count == 1:
            self.source.start(0, 0)
            self.source.feed()
            self._run = capture(self._step)

    def __call__(self) -> None:
        """Train on the next batch."""
        self.source.feed()
        self._run()

    def _step(self) -> None:
        x, index, labels = self.source.take()
        # every process draws for the whole batch: what is computed does not depend on how many there are
        crops = draw_crops(self.recipe.run.batch, self.pad, self.device, self.recipe.data.flip)
        holes = draw_holes(self.recipe.run.batch, self.size, self.device) if self.cutout else ()
        self.optimizer.zero_grad(set_to_none=True)
        # Autocast is entered outside the compiled code: torch does not cache programs that enter it. Its type is not in
        # the cache's key, but the images are rounded to the same type, and that is.
        autocast = torch.autocast(
            self.device.type, self.precision, enabled=self.precision != torch.float32, cache_enabled=False
        )
        with autocast, self.own or nullcontext():
            loss, correct = self._loss(x, index, labels, *(drawn[self.share] for drawn in (*crops, *holes)))
        loss.backward()
        if self.recipe.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.recipe.optimizer.clip)
        self.optimizer.step()
        self._after_step()
        self.loss_sum += loss.detach()
        self.correct += correct
        self.position += 1

    def _loss_and_correct(
        self,
        x: Tensor,  # (m, channels, height, width) uint8
        index: Tensor,  # (batch,) in 0..m-1
        labels: Tensor,  # (batch,)
        top: Tensor,  # (batch,)
        left: Tensor,  # (batch,)
        flipped: Tensor,  # (batch,)
        row: Tensor | None = None,  # (batch,), of the hole in each image
        column: Tensor | None = None,  # (batch,)
    ) -> tuple[Tensor, Tensor]:
        cropped = crop_flip(x, top, left, flipped, self.pad, index)
        inputs = normalize(cropped, self.mean, self.std, self.precision)
        if row is not None and column is not None:
            inputs = cut_out(inputs, row, column, self.cutout)
        logits = self._forward(inputs.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)
        return loss, (logits.argmax(1) == labels).sum()

    @torch.no_grad()
    def _after_step(self) -> None:
        if self.matcher is None or self.norms is None:
            return
        row = self.position.reshape(1) % len(self.norms)  # a capture warms up past the end of a short run
        if self.recipe.decay.kind == "normalized":
            self.matcher.rescale(self.norms.index_select(0, row)[0])
        else:
            self.norms.index_copy_(0, row, self.matcher.norms()[None])


def autocast_type(precision: str, device: torch.device) -> torch.dtype:
    """Return the type that a recipe's ``run.precision`` means on ``device``."""
    rounds = precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if rounds else torch.float32
