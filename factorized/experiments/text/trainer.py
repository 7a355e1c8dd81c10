"""transformers' Trainer for text: with a recipe's optimizer, a task's batches, loss and scores, and sharding."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils.import_utils import is_torch_tf32_available

from factorized._torch import set_up_compiler
from factorized.decay.hook import inner_optimizer
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.captured import CapturedPasses
from factorized.experiments.text.network import build_schedule, build_text_optimizer
from factorized.experiments.text.sharding import shard, split_when_loaded, whole_state, whole_weights
from factorized.experiments.text.task import Batch, TextTask
from factorized.experiments.training.folder import CHECKPOINTS
from factorized.experiments.training.interrupt import StopRequest
from factorized.experiments.training.own_numbers import default_generator
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.source import draws_seed
from factorized.experiments.training.step import autocast_type
from factorized.integrations.masks import skip_masks
from factorized.integrations.transformers import own_names
from factorized.optim.lamb import Lamb

Row = dict[str, Any]
COUNT = "num_items_in_batch"  # the number of labels of an update, as Trainer calls it


def training_arguments(
    recipe: TextRecipe, folder: Path, seed: int, device: torch.device, processes: int
) -> TrainingArguments:
    """Return a recipe as arguments of transformers' Trainer."""
    run, schedule = recipe.run, recipe.schedule
    each = 1 if recipe.task == "translation" else run.batch // run.accumulate
    if each % processes and recipe.task != "translation":
        raise ValueError(
            f"run.batch = {run.batch} cannot be shared by {processes} processes, {run.accumulate} parts each; make it "
            f"a multiple of {processes * run.accumulate}"
        )
    return TrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        max_steps=schedule.updates,
        per_device_train_batch_size=max(1, each // processes),
        gradient_accumulation_steps=run.accumulate,
        max_grad_norm=recipe.optimizer.clip or 0.0,
        tf32=True if run.compile and device.type == "cuda" and is_torch_tf32_available() else None,  # of validation
        use_cpu=device.type == "cpu",
        seed=seed,
        data_seed=seed,
        logging_steps=max(1, min(run.evaluate_every, schedule.updates) // 10),
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=min(run.evaluate_every, schedule.updates),
        save_steps=min(run.checkpoint_every, schedule.updates),
        save_total_limit=1,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=[],
        accelerator_config={"even_batches": False} if recipe.task == "translation" else None,
    )


class TextTrainer(Trainer):
    """transformers' Trainer on the examples of a task, with its loss and its scores."""

    def __init__(self, task: TextTask, model: nn.Module, arguments: TrainingArguments, watch: TrainerCallback) -> None:
        self.task, self.network, self.sharded = task, model, task.recipe.run.shard
        task.prepare(model)
        super().__init__(
            model=model,
            args=arguments,
            data_collator=task.collate,
            train_dataset=task.examples,
            eval_dataset=task.examples,  # not read: ``evaluate`` asks the task
            compute_loss_func=task.loss if task.predicts_tokens else None,  # tells Trainer whether losses are means
            callbacks=[watch],
        )
        if arguments.process_index > 0:  # Trainer has seeded all processes alike: they would drop the same entries
            own = draws_seed(arguments.seed, 0, arguments.process_index)
            default_generator(arguments.device).manual_seed(own)
        self.precision = autocast_type(task.recipe.run.precision, arguments.device)
        self._loss = self._network_and_loss
        if task.recipe.run.compile:
            set_up_compiler()
            # as one: the logits, which are larger than everything else, are not written out in float32
            self._loss = torch.compile(self._network_and_loss)
        self._passes: CapturedPasses | None = None
        self._skips_masks: bool | None = None  # until the first batch
        self.model_accepts_loss_kwargs = False  # most models take the number of labels and do not divide by it
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Return the recipe's optimizer, its decay attached; with ``run.shard``, shard the network first.

        By then the weights of a checkpoint have been loaded: they are the same file with and without sharding.
        """
        if self.optimizer is None:
            if self.sharded:
                shard(self.network, self.args.device)
                self.is_distributed_loading_by_transformers = True  # the trainer does not wrap the network then
            self.optimizer = build_text_optimizer(self.task.recipe, self.network)
            if self.sharded:
                split_when_loaded(self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Return the recipe's schedule."""
        if self.lr_scheduler is None:
            self.lr_scheduler = build_schedule(self.task.recipe, optimizer or self.create_optimizer())
        return self.lr_scheduler

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches that the task makes itself, or else Trainer's."""
        sampler = self.task.batches(self.args.seed, self.args.gradient_accumulation_steps * self.args.world_size)
        if sampler is None:
            return super().get_train_dataloader()
        loader = DataLoader(self.task.examples, batch_sampler=sampler, collate_fn=self.task.collate)
        return self.accelerator.prepare_data_loader(loader)

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Train the network, which attends as before afterwards."""
        try:
            return super().train(*arguments, **keywords)
        finally:
            if self._skips_masks:
                network: Any = self.network
                network.set_attn_implementation("sdpa")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Continue from a checkpoint; batches were made ahead of it, so what they draw does not go on by itself."""
        super()._load_optimizer_and_scheduler(checkpoint)
        args = self.args
        self.task.continue_after(self.state.num_input_tokens_seen // args.world_size, args.seed + args.process_index)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Count the tokens of a batch, its padding included, and do Trainer's step, as one CUDA graph if it can.

        A graph is captured for the first batch of every shape, and replayed for the others.
        """
        self.state.num_input_tokens_seen += inputs["input_ids"].numel() * self.args.world_size
        if self._skips_masks is None:
            self._skips_masks = self.task.recipe.run.compile and self._skip_masks(inputs)
        if not self.task.is_captured(self.args.device, self.args.world_size):
            return super().training_step(model, inputs, num_items_in_batch)
        if self._passes is None:
            self._passes = CapturedPasses(partial(self._step_on, model), model.parameters(), self.args.device)
        return self._passes({**self.task.to_capture(inputs), COUNT: num_items_in_batch})

    def _skip_masks(self, inputs: Batch) -> bool:
        one = {name: tensor[:1].to(self.args.device) for name, tensor in inputs.items() if name != "labels"}
        return skip_masks(self.network, one)

    def release_graphs(self) -> None:
        """Free the memory of the captured passes; the next step captures another one."""
        if self._passes is not None:
            self._passes.release()
            self._passes = None

    def _step_on(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        count = batch.pop(COUNT)
        return super().training_step(model, batch, count)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the task's loss, or the model's own where that is a mean over examples."""
        # Not accelerate's autocast, which would be entered in the compiled code: torch does not cache such programs.
        with torch.autocast(self.args.device.type, self.precision, enabled=self.precision != torch.float32):
            loss = self._loss(model, inputs, num_items_in_batch)
        # what a process computes is its share of a sum, and DDP takes the mean
        return loss * self.args.world_size if self.task.predicts_tokens else loss

    def _network_and_loss(self, model: nn.Module, inputs: Batch, count: torch.Tensor) -> torch.Tensor:
        if not self.task.predicts_tokens:
            return model(**inputs)["loss"]
        labels = inputs["labels"]
        outputs = model(**{name: tensor for name, tensor in inputs.items() if name != "labels"})
        return self.task.loss(outputs, labels, count)

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        """Return the task's figures on the validation text."""
        # neither compiled nor in DDP, and without autocast: what is measured is what is saved
        found = {f"eval_{name}": value for name, value in self.task.validate(self.network).items()}
        self.log(found)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.sharded:  # else layers are moved one by one
            super()._move_model_to_device(model, device)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.sharded:
            state_dict = whole_weights(self.network)
        if self.args.should_save:
            with own_names(self.network):
                super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        states = {
            OPTIMIZER_NAME: whole_state(self.create_optimizer()),
            SCHEDULER_NAME: self.create_scheduler(self.args.max_steps).state_dict(),
        }
        for name, state in states.items() if self.args.should_save else ():
            torch.save(state, Path(output_dir) / name)


class Watch(TrainerCallback):
    """Reports logged figures, measures speed, and stops training with a checkpoint after a signal.

    Speed is measured between logged losses. Each is read from the device, which has then finished the updates before.
    The updates up to the first loss compile and are not measured; nor are evaluations and checkpoints.
    """

    def __init__(
        self, stop: StopRequest, processes: Processes, tell: Callable[[Row], None], saved: Callable[[], None]
    ) -> None:
        self.stop, self.processes, self.tell = stop, processes, tell
        self.saved = saved  # called after every checkpoint
        self.stopped = False
        self.tokens, self.seconds = 0, 0.0  # of the measured updates
        self.since: tuple[int, float] | None = None  # tokens and time at the beginning of those being measured

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Row | None = None,
        **others: Any,
    ) -> None:
        """Report figures with the update they belong to."""
        names = {"eval_loss": "validation_loss"}
        figures = {
            names.get(name, name.removeprefix("eval_")): value
            for name, value in (logs or {}).items()
            if isinstance(value, int | float) and name not in ("epoch", "total_flos") and not name.startswith("train_")
        }
        if "loss" in figures:
            optimizer = inner_optimizer(others["optimizer"])
            if isinstance(optimizer, Lamb) and optimizer.skipped:
                figures["skipped"] = optimizer.skipped
            now = (state.num_input_tokens_seen, time.perf_counter())
            if self.since is not None:
                self.tokens += now[0] - self.since[0]
                self.seconds += now[1] - self.since[1]
            self.since = now
        if figures:
            self.tell({"update": state.global_step, **figures})

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Measure speed from here on: something else than training took time."""
        self.since = (state.num_input_tokens_seen, time.perf_counter())

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Report a checkpoint, and measure speed from here on."""
        self.saved()
        self.on_evaluate(args, state, control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> TrainerControl:
        """Request a checkpoint and the end of training after a signal."""
        asked = self.processes.asked_to_stop(self.stop, state.global_step)
        if asked and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = self.stopped = True
        return control
