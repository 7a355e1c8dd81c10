"""The training loop: seeds, epochs, steps; checkpoints, interruptions, results."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from factorized.decay.forms import forms
from factorized.planning.cost import count_parameters, measure
from factorized.vision.data.images import Images
from factorized.vision.evaluate import Evaluator
from factorized.vision.interrupt import Interrupted, StopRequest
from factorized.vision.network import build_network, build_optimizer, set_learning_rate
from factorized.vision.progress import Reporter
from factorized.vision.recipe import Recipe
from factorized.vision.record import Recorder, describe_machine, product_row, write_json
from factorized.vision.source import OnDevice, Source, epoch_seed
from factorized.vision.state import (
    FILE,
    RunState,
    check_recipe_matches,
    gather,
    load_state,
    prepare_folder,
    restore,
    restore_random,
    save_state,
)
from factorized.vision.step import TrainingStep, autocast_type
from factorized.vision.trained import RESULT, save_trained

NORMS = "norms.safetensors"


def train(
    recipe: Recipe,
    images: Images,
    folder: Path,
    *,
    seeds: Sequence[int] = (0,),
    device: torch.device | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> list[dict[str, Any]]:
    """Train the recipe's network once for each seed, into ``folder/seed-<seed>``, and return the results.

    All seeds share one copy of the data and, on a GPU, one compiled and captured step. Under ``torchrun`` every process
    calls this and trains on its share of each batch; the first one writes.
    """
    reporter = reporter or Reporter(quiet=True)
    trainer = Trainer(
        recipe, images, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), seeds[0]
    )
    results = []
    with reporter, StopRequest() as stop:
        for seed in seeds:
            run_folder = folder / f"seed-{seed}"
            if trainer.is_first:
                prepare_folder(run_folder, trainer.network, resume=resume, overwrite=overwrite)
            results.append(trainer.run(seed, run_folder, resume, reporter, stop))
    return results


class Trainer:
    """A recipe's network, optimizer, data and step on one device: made once, and run for one seed after another."""

    def __init__(self, recipe: Recipe, images: Images, device: torch.device, seed: int) -> None:
        self.recipe, self.images, self.device = recipe, images, device
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.is_first = self.rank == 0
        self.network = build_network(recipe, images, seed)
        self.macs = measure(self.network, torch.zeros(1, images.channels, *images.size), {}).macs
        self.network.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self.optimizer = build_optimizer(recipe, self.network)
        self.source: Source = OnDevice(images, recipe.run.batch, device, self.rank, self.ranks)
        self.total_steps = recipe.schedule.epochs * self.source.steps
        self.step = TrainingStep(
            recipe, self.network, self.optimizer, self.source, images, self._norms_table(seed), self.ranks
        )
        self.evaluate = Evaluator(self.network, images, autocast_type(recipe, device))

    def run(self, seed: int, folder: Path, resume: bool, reporter: Reporter, stop: StopRequest) -> dict[str, Any]:
        """Train with one seed, from the beginning or from the folder's checkpoint, and return the result."""
        epochs, steps = self.recipe.schedule.epochs, self.source.steps
        state = self._begin(seed, folder, resume)
        recorder = Recorder(folder, state.history) if self.is_first else None
        reporter.begin(f"{self.recipe.name} seed {seed}", self.total_steps, state.epoch * steps + state.step)
        for epoch in range(state.epoch, epochs):
            lr = self.recipe.schedule.learning_rate(self.recipe.optimizer.lr, epoch)
            set_learning_rate(self.optimizer, lr)
            first = self._begin_epoch(state, epoch)
            began = time.perf_counter()
            for number in range(first, steps):
                self.step()
                if stop.number is not None and self.ranks == 1:
                    state.epoch, state.step = epoch, number + 1
                    self._save(state, folder, began)
                    raise Interrupted(stop.number)
                reporter.step(epoch, number, self.step.loss_sum, self._speed(number - first + 1, began))
            row = self._finish_epoch(epoch, lr, first, began)
            state.history.append(row)
            state.epoch, state.step = epoch + 1, 0
            if recorder is not None:
                recorder.add(row)
            reporter.epoch(row, epochs, steps)
            if state.epoch % self.recipe.run.checkpoint_every == 0 or state.epoch == epochs:
                self._save(state, folder, began)
            else:
                state.seconds += time.perf_counter() - began
            if self._anyone_stopped(stop):
                raise Interrupted(stop.number or signal.SIGTERM)
        if recorder is not None:
            recorder.close()
        return self._finish(state, folder)

    def _begin(self, seed: int, folder: Path, resume: bool) -> RunState:
        recipe = self.recipe.to_dict()
        if resume and (folder / FILE).exists():
            state = load_state(folder)
            check_recipe_matches(state, recipe, seed, folder)
        else:
            state = RunState(recipe, seed, network=build_network(self.recipe, self.images, seed).state_dict())
        restore(state, self.network, self.optimizer, self.step)
        if self.recipe.decay.kind == "normalized" and self.step.norms is not None:
            self.step.norms.copy_(self._followed_norms(seed))
        return state

    def _begin_epoch(self, state: RunState, epoch: int) -> int:
        """Start the epoch's order and randomness, or go on within it; return the step to begin with."""
        first = state.step if epoch == state.epoch else 0
        self.source.start(state.seed, epoch, first)
        if first:
            restore_random(state, self.device)
        else:
            torch.manual_seed(epoch_seed(state.seed, epoch) + self.rank)
            self.step.loss_sum.zero_()
            self.step.correct.zero_()
        return first

    def _finish_epoch(self, epoch: int, lr: float, first: int, began: float) -> dict[str, Any]:
        steps = self.source.steps
        loss = self._loss(steps)  # waits for the device
        speed = self._speed(steps - first, began)
        if not math.isfinite(loss):
            raise ValueError(
                f"the training loss is {loss} after epoch {epoch + 1}, at learning rate {lr:g}; the checkpoint before "
                f"it is kept. Try optimizer.lr={self.recipe.optimizer.lr / 3:.2g}, schedule.warmup_epochs=1 or "
                "optimizer.clip=1"
            )
        accuracy = 100 * self._total(self.step.correct) / (steps * self.recipe.run.batch)
        row: dict[str, Any] = {"epoch": epoch, "lr": lr, "loss": loss, "accuracy": accuracy, "images_per_second": speed}
        if (epoch + 1) % self.recipe.run.evaluate_every == 0 or epoch + 1 == self.recipe.schedule.epochs:
            row["test_loss"], row["test_accuracy"] = self.evaluate()
        if self.recipe.run.diagnose:
            row |= product_row(self.network, lr)
        return {**row, "seconds": time.perf_counter() - began}

    def _finish(self, state: RunState, folder: Path) -> dict[str, Any]:
        accuracies = [row["test_accuracy"] for row in state.history if "test_accuracy" in row]
        result = {
            "recipe": state.recipe,
            "seed": state.seed,
            "accuracy": accuracies[-1],
            "best_accuracy": max(accuracies),
            "parameters": count_parameters(self.network),
            "macs": self.macs,
            "seconds": state.seconds,
            "machine": {**describe_machine(self.device), "processes": self.ranks},
            "data": {
                "name": self.images.name,
                "checksum": self.images.checksum,
                "classes": list(self.images.classes),
                "channels": self.images.channels,
                "size": list(self.images.size),
            },
            "history": state.history,
        }
        if self.is_first:
            save_trained(self.network, folder)
            if self.recipe.decay.record_norms and self.step.norms is not None:
                save_file({"norms": self.step.norms.cpu()}, folder / NORMS)
            write_json(folder / RESULT, result)
        return result

    def _save(self, state: RunState, folder: Path, began: float) -> None:
        gather(state, self.network, self.optimizer, self.step)
        state.seconds += time.perf_counter() - began
        if self.is_first:
            save_state(state, folder)

    def _anyone_stopped(self, stop: StopRequest) -> bool:
        """Say, after an epoch, whether a process was asked to stop: only then can several stop together."""
        return self.ranks > 1 and self._total(torch.tensor(float(stop.number is not None), device=self.device)) > 0

    def _loss(self, steps: int) -> float:
        return self._total(self.step.loss_sum) / (steps * self.ranks)

    def _total(self, count: Tensor) -> float:
        if self.ranks > 1:
            count = count.clone()
            dist.all_reduce(count)
        return float(count.item())

    def _speed(self, steps: int, began: float) -> float:
        return steps * self.recipe.run.batch / (time.perf_counter() - began)

    def _norms_table(self, seed: int) -> Tensor | None:  # (steps of the run, forms)
        if self.recipe.decay.kind == "normalized":
            return self._followed_norms(seed).to(self.device)
        if self.recipe.decay.record_norms:
            return torch.zeros(self.total_steps, len(forms(self.network)), device=self.device)
        return None

    def _followed_norms(self, seed: int) -> Tensor:  # (steps of the run, forms)
        path = Path(str(self.recipe.decay.norms).format(seed=seed)) / NORMS
        if not path.is_file():
            raise ValueError(f"decay.norms: there is no {path}; train that run with decay.record_norms=true first")
        norms = load_file(path)["norms"]
        expected = (self.total_steps, len(forms(self.network)))
        if tuple(norms.shape) != expected:
            raise ValueError(f"{path} holds (steps, products) = {tuple(norms.shape)}, and this run needs {expected}")
        return norms
