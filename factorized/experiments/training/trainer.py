"""A recipe's network, optimizer, data and step on one device, trained for one seed after another."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorized.experiments.data.images import Images
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.evaluate import Evaluator
from factorized.experiments.training.folder import writing
from factorized.experiments.training.interrupt import Interrupted, StopRequest
from factorized.experiments.training.network import (
    Start,
    build_dense,
    build_optimizer,
    check_network,
    count_macs,
    factorize_network,
    infinite_buffers,
    plan_network,
    set_learning_rate,
)
from factorized.experiments.training.norms import norms_table, write_norms
from factorized.experiments.training.processes import ASK, Processes
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.record import (
    Recorder,
    describe_data,
    describe_machine,
    layer_rows,
    product_row,
    write_json,
)
from factorized.experiments.training.result import RESULT, Result, read_result
from factorized.experiments.training.source import OnDevice, Source, draws_seed
from factorized.experiments.training.state import (
    FILE,
    RunState,
    add_devices,
    check_fits,
    check_same_devices,
    check_same_run,
    gather,
    load_state,
    own_of,
    restore,
    restore_random,
    save_state,
)
from factorized.experiments.training.step import TrainingStep, autocast_type
from factorized.experiments.training.streamed import Streamed
from factorized.experiments.training.threads import one_thread
from factorized.experiments.training.trained import save_trained
from factorized.experiments.training.turns import STEPS
from factorized.nn.running import count_parameters
from factorized.surgery.compose import compose
from factorized.surgery.progress import Progress, late

HIGHEST = 0.1  # the highest learning rate to suggest: the paper's
AT_ONCE = 3  # runs of a small network on a GPU; on an H200 three take 1.96 times as long as one
SMALL = 1e10  # multiply-accumulates of a batch; ResNet-32 has 8.8e9 with 128 images


class Trainer:
    """A recipe's network, optimizer, data and step on one device: made once, and run for one seed after another.

    Where several of them take turns, each is made and run in its own turn.
    """

    def __init__(
        self,
        recipe: Recipe,
        images: Images,
        processes: Processes,
        seed: int,
        *,
        allow_other_devices: bool = False,
        progress: Progress | None = None,  # of decompositions that take a while
        start: Start | None = None,
    ) -> None:
        self.seed, self.allow_other_devices, self.progress = seed, allow_other_devices, progress
        self.recipe, self.images, self.processes, self.device = recipe, images, processes, processes.device
        if start is None:
            dense = build_dense(recipe, images, seed)
            self.plan = plan_network(recipe, dense, images)
            self.network = self._factorize(dense)
        else:
            self.plan, self.network = start.plan, start.network.cpu()
        check_network(recipe, self.network, images)
        self.macs = count_macs(self.network, self.plan, images)
        # of the first seed; others are drawn when their turn comes
        self.fresh = {seed: {name: tensor.clone() for name, tensor in self.network.state_dict().items()}}
        self.network.to(self.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]  # torch's overloads forget it
        self.optimizer = build_optimizer(recipe, self.network)
        self.source = self._build_source()
        norms = self._norms(seed)
        self.step = TrainingStep(recipe, self.network, self.optimizer, self.source, images, norms, processes)
        self.evaluate = Evaluator(self.network, images, autocast_type(recipe.run.precision, self.device))
        self.may_be_infinite = infinite_buffers(self.network)
        state = sum(tensor.nbytes for tensor in self.network.state_dict().values())
        # weights and momentum, the old file beside the new one, and the model at the end; the norms; room for logs
        self.bytes_to_write = 5 * state + (0 if norms is None else 3 * norms.nbytes) + 2**20

    @property
    def runs_at_once(self) -> int:
        """How many runs the device has room for at once, judged by the size of the network."""
        small = self.macs * self.recipe.run.batch <= SMALL
        return AT_ONCE if small and self.device.type == "cuda" else 1

    def run(
        self, seed: int, folder: Path, resume: bool, reporter: Reporter, stop: StopRequest, at_once: int = 1
    ) -> Generator[None, None, Result]:
        """Train with one seed, from the beginning or from the folder's checkpoint, and return the result.

        It is done in turns, of which the first prepares the run. On a GPU that ``at_once`` runs share, a turn waits for
        nothing that it issues itself.
        """
        turn = STEPS if at_once > 1 and self.device.type == "cuda" else 1
        epochs, steps = self.recipe.schedule.epochs, self.source.steps
        state = self.processes.from_first(lambda: self._initial_state(seed, folder, resume))
        if resume and state.epoch == epochs and self.processes.from_first((folder / RESULT).is_file):
            return self.processes.from_first(lambda: read_result(folder, "images"))
        self._begin(state)
        add_devices(state, self.processes.kind, folder, reporter.note)
        state.at_once = max(state.at_once, at_once)
        reporter.begin(f"{self.recipe.name} seed {seed}", epochs, steps, state.epoch * steps + state.step)
        with Recorder(folder if self.processes.is_first else None, state.history) as recorder:
            yield  # before the clock starts: others may have to be built
            for epoch in range(state.epoch, epochs):
                first = self._begin_epoch(state, epoch)
                lr = self._set_learning_rate(epoch, max(first - 1, 0))  # of the last step, where all have been taken
                began = time.perf_counter()
                for number in range(first, steps):
                    if self.recipe.schedule.shape == "linear":
                        lr = self._set_learning_rate(epoch, number)
                    self.step()
                    if self.processes.asked_to_stop(stop, number + 1):
                        self._check_finite(epoch, lr, number + 1)
                        self._save(state, folder, epoch, number + 1, began)
                        raise Interrupted(stop.number or signal.SIGTERM)
                    if (number + 1) % turn == 0 or number + 1 == steps:
                        yield  # until the GPU has done these steps, if others share it
                        reporter.step(epoch, number, self.step.loss_sum, self._speed(number - first + 1, began))
                row = yield from self._finish_epoch(epoch, lr, first, began)
                state.history.append(row)
                recorder.add(row)
                reporter.epoch(row)
                stopping = epoch + 1 < epochs and self.processes.asked_to_stop(stop, ASK)
                if stopping or (epoch + 1) % self.recipe.run.checkpoint_every == 0 or epoch + 1 == epochs:
                    self._save(state, folder, epoch + 1, 0, began)
                else:
                    state.seconds += time.perf_counter() - began
                if stopping:
                    raise Interrupted(stop.number or signal.SIGTERM)
        return self._finish(state, folder)

    def _set_learning_rate(self, epoch: int, step: int) -> float:
        schedule = self.recipe.schedule
        at = epoch + (step + 0.5) / self.source.steps if schedule.shape == "linear" else epoch
        lr = schedule.learning_rate(self.recipe.optimizer.lr, at)
        set_learning_rate(self.optimizer, lr)
        return lr

    def _build_source(self) -> Source:
        data, batch = self.recipe.data, self.recipe.run.batch
        if data.place == "loader":
            return Streamed(self.images, batch, self.processes, data.workers)
        return OnDevice(self.images, batch, self.processes)

    def _norms(self, seed: int) -> Tensor | None:  # (steps of the run, products)
        norms = norms_table(self.recipe, self.network, self.recipe.schedule.epochs * self.source.steps, seed)
        return None if norms is None else norms.to(self.device)

    def _initial_state(self, seed: int, folder: Path, resume: bool) -> RunState:
        recipe, data = self.recipe.to_dict(), self.images.checksum
        if resume and (folder / FILE).exists():
            state = load_state(folder)
            check_same_run(state, recipe, seed, data, folder)
            check_fits(state, folder, self.network, self.optimizer, self.step, self.may_be_infinite)
            if state.epoch < self.recipe.schedule.epochs and not self.allow_other_devices:
                check_same_devices(state.ran_on, self.processes.kind, folder)
            return state
        if resume and (folder / RESULT).is_file():  # a finished run whose checkpoint was deleted
            ended = read_result(folder, "images")
            parts = {"recipe": ended["recipe"], "seed": ended["seed"], "data": ended["data"]["checksum"]}
            state = RunState(**parts, epoch=self.recipe.schedule.epochs)
            check_same_run(state, recipe, seed, data, folder)
            return state
        return RunState(recipe=recipe, seed=seed, data=data, network=self._draw(seed))

    def _draw(self, seed: int) -> dict[str, Tensor]:
        """Return the weights that a run with ``seed`` begins with."""
        if seed in self.fresh:
            return self.fresh.pop(seed)
        dense = build_dense(self.recipe, self.images, seed)
        return self._factorize(dense).state_dict()

    def _factorize(self, dense: nn.Module) -> nn.Module:
        progress = None if self.progress is None else late(self.progress)
        with one_thread():
            return factorize_network(self.recipe, dense, self.plan, progress)

    def _begin(self, state: RunState) -> None:
        restore(state, self.network, self.optimizer, self.step)
        self.step.loss_sum *= self.processes.count  # saved as the mean of theirs
        if not self.processes.is_first:  # the first process holds the counts of the epoch under way
            self.step.loss_sum.zero_()
            self.step.correct.zero_()
        normalized, kept = self.recipe.decay.kind == "normalized", self.step.norms
        if normalized and kept is not None and (norms := self._norms(state.seed)) is not None:
            kept.copy_(norms)

    def _begin_epoch(self, state: RunState, epoch: int) -> int:
        """Start the epoch's order and randomness, or resume within it; return the step to begin with."""
        first = state.step if epoch == state.epoch else 0
        self.source.start(state.seed, epoch, first)
        if self.step.own is not None:
            self.step.own.seed(draws_seed(state.seed, epoch, self.processes.rank))
        if first:
            restore_random(state, self.step, self.processes.rank)
        else:
            torch.manual_seed(draws_seed(state.seed, epoch))
            self.step.loss_sum.zero_()
            self.step.correct.zero_()
        return first

    def _finish_epoch(self, epoch: int, lr: float, first: int, began: float) -> Generator[None, None, dict[str, Any]]:
        steps = self.source.steps
        loss = self._check_finite(epoch, lr, steps)  # waits for the device
        speed = self._speed(steps - first, began)
        accuracy = 100 * self.processes.total(self.step.correct) / (steps * self.recipe.run.batch)
        row: dict[str, Any] = {"epoch": epoch + 1, "lr": lr, "loss": loss, "accuracy": accuracy}
        row["images_per_second"] = speed
        if (epoch + 1) % self.recipe.run.evaluate_every == 0 or epoch + 1 == self.recipe.schedule.epochs:
            self.evaluate.begin()
            yield  # until the GPU has done that
            row["test_loss"], row["test_accuracy"] = self.evaluate.end()
            if self.recipe.run.diagnose:  # singular values take a CPU 0.3 s for WideResNet-28-10 as a Tensor-Train
                row |= product_row(self.network, lr)
        return {**row, "seconds": time.perf_counter() - began}

    def _finish(self, state: RunState, folder: Path) -> Result:
        accuracies = [float(value) for row in state.history if (value := row.get("test_accuracy")) is not None]
        result: Result = {
            "recipe": state.recipe,
            "seed": state.seed,
            "accuracy": accuracies[-1],
            "best_accuracy": max(accuracies),
            "parameters": count_parameters(self.network),
            "macs": self.macs,
            "seconds": state.seconds,
            "ran_on": state.ran_on,
            "machine": {
                **describe_machine(self.device),
                "processes": self.processes.count,
                "runs_at_once": state.at_once,
            },
            "data": describe_data(self.images),
            "layers": layer_rows(self.network),
            "history": state.history,
        }
        if self.recipe.factorize.scheme == "overcomplete":
            result["composed"] = self._compose()
        if self.processes.is_first:
            with writing(folder):
                result["files"] = save_trained(self.network, folder)
                if self.recipe.decay.record_norms and self.step.norms is not None:
                    write_norms(self.step.norms, folder)
                write_json(folder / RESULT, result)  # written last: if it exists, everything else does
        return result

    def _compose(self) -> dict[str, Any]:
        """Return the accuracy and the size of what is deployed: the network with its products multiplied out."""
        network = compose(self.network)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads forget it
        _, accuracy = Evaluator(network, self.images, self.evaluate.precision, graph=False)()
        return {"accuracy": accuracy, "parameters": count_parameters(network)}

    def _save(self, state: RunState, folder: Path, epoch: int, step: int, began: float) -> None:
        state.epoch, state.step = epoch, step
        gather(state, self.network, self.optimizer, self.step)
        if self.step.own is not None:
            for rank, own in enumerate(self.processes.of_each(self.step.own.state)):
                state.random[own_of(rank, self.device)] = own
        # as one process counts them: another number of processes may continue
        state.counts["loss_sum"].fill_(self.processes.total(self.step.loss_sum) / self.processes.count)
        state.counts["correct"].fill_(self.processes.total(self.step.correct))
        state.seconds += time.perf_counter() - began
        if self.processes.is_first:
            with writing(folder):
                save_state(state, folder)

    def _check_finite(self, epoch: int, lr: float, steps: int) -> float:
        """Return the mean loss of the epoch's steps; raise if the loss or the learned weights are not finite."""
        loss = self.processes.total(self.step.loss_sum) / (steps * self.processes.count)
        state = self.network.state_dict().items()
        learned = [t for name, t in state if t.is_floating_point() and t.numel() and name not in self.may_be_infinite]
        largest = torch.stack([norm.float() for norm in torch._foreach_norm(learned, math.inf)])
        whole = largest.isfinite().all()
        lost = "" if self.processes.total(whole.int()) == self.processes.count else " and weights are not finite"
        if math.isfinite(loss) and not lost:
            return loss
        raise ValueError(
            f"the training loss is {loss:g}{lost} in epoch {epoch + 1}, at learning rate {lr:g}; the checkpoint before "
            f"it, if there was one, is kept. Try {self._advice()}"
        )

    def _advice(self) -> str:
        """Return settings that may keep the weights finite, without those that the recipe already has."""
        optimizer, schedule = self.recipe.optimizer, self.recipe.schedule
        ways = [f"optimizer.lr={min(optimizer.lr / 3, HIGHEST):.2g}"]
        if not schedule.warmup_epochs and schedule.shape == "milestones":
            ways.append("schedule.warmup_epochs=1")
        if optimizer.clip is None or optimizer.clip > 1:
            ways.append("optimizer.clip=1")
        return " or ".join(ways)

    def _speed(self, steps: int, began: float) -> float:
        return steps * self.recipe.run.batch / (time.perf_counter() - began)
