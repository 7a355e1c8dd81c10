"""Trains a text recipe: seeds, folders, interruptions and results around transformers' Trainer."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

from factorized.experiments.models.hugging_face import quiet
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.corpus import Corpus
from factorized.experiments.text.from_run import origin
from factorized.experiments.text.language import LanguageTask
from factorized.experiments.text.masked import MaskedTask
from factorized.experiments.text.network import build_text_network
from factorized.experiments.text.questions import QuestionsTask
from factorized.experiments.text.task import TextTask
from factorized.experiments.text.trained import load_network, save_text_model
from factorized.experiments.text.trainer import TextTrainer, Watch, training_arguments
from factorized.experiments.text.translation import TranslationTask
from factorized.experiments.training.folder import BEGUN, CHECKPOINTS, METRICS, prepare_folders, writing
from factorized.experiments.training.interrupt import PATIENCE, Interrupted, StopRequest
from factorized.experiments.training.processes import Processes, joined_processes
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.record import Recorder, describe_machine, layer_rows, write_json
from factorized.experiments.training.result import RESULT, read_result
from factorized.experiments.training.state import REMEDY, RunState, add_devices, check_same_devices, check_same_run
from factorized.files.atomic import write_text
from factorized.nn.running import count_parameters

TASKS: dict[str, type[TextTask]] = {
    "language": LanguageTask,
    "masked": MaskedTask,
    "translation": TranslationTask,
    "questions": QuestionsTask,
}


def train_text(
    recipe: TextRecipe,
    corpus: Corpus,
    folder: Path,
    *,
    seeds: Sequence[int] = (0,),
    device: torch.device | str | None = None,
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    allow_other_devices: bool = False,
    reporter: Reporter | None = None,
    start: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Train the recipe's network once for each seed, into ``folder/seed-<seed>``, and return the results.

    ``resume``, ``overwrite`` and ``allow_other_devices`` are those of ``train`` for images. ``start`` is trained in
    place of the recipe's own network, with one seed. Under ``torchrun`` every process calls this.
    """
    if start is not None and len(seeds) > 1:
        raise ValueError(f"start is one network, trained with one seed, got seeds {list(seeds)}")
    folders = [folder / f"seed-{seed}" for seed in seeds]
    task = TASKS[recipe.task](recipe, corpus)
    _check_batch(task)
    results = []
    with joined_processes(device) as processes, ExitStack() as claims:
        if recipe.run.shard and processes.count == 1:
            raise ValueError(
                "run.shard = true splits a network over several processes, and this is the only one; start it with "
                "torchrun --nproc-per-node N -m factorized train ..., or set run.shard = false"
            )
        model = build_text_network(recipe, corpus.tokenizer, seeds[0]) if start is None else start
        needed = 6 * sum(parameter.nbytes for parameter in model.parameters()) + 2**20
        processes.from_first(lambda: prepare_folders(folders, needed, claims, resume=resume, overwrite=overwrite))
        shown = reporter if reporter is not None and processes.is_first else Reporter(quiet=True)
        with shown, StopRequest(PATIENCE if processes.count > 1 else 0.0) as stop:
            for seed, run in zip(seeds, folders, strict=True):
                begun = _begun(run, recipe, seed, corpus) if resume else None
                if resume and (run / RESULT).is_file():
                    results.append(read_result(run, "text"))
                    continue
                checkpoint = _last_checkpoint(run) if resume else None
                if begun is None or checkpoint is None:
                    begun = RunState(recipe=recipe.to_dict(), seed=seed, data=corpus.checksum)
                if not allow_other_devices:
                    check_same_devices(begun.ran_on, processes.kind, run)
                if seed != seeds[0]:
                    model = build_text_network(recipe, corpus.tokenizer, seed)
                results.append(_train_one(task, model, run, begun, checkpoint, processes, shown, stop))
    return results


def _check_batch(task: TextTask) -> None:
    """Raise if there are too few examples for one batch: incomplete ones are left out, and nothing would be trained."""
    count, batch = len(task.examples), task.recipe.run.batch  # type: ignore[arg-type]  # torch's class has no length
    if task.recipe.task != "translation" and count < batch:  # whose batches have as many pairs as there are
        raise ValueError(
            f"the training text makes {count} sequences of data.length = {task.recipe.data.length}, fewer than "
            f"run.batch = {batch}; give more text, or a smaller run.batch"
        )


def _train_one(
    task: TextTask,
    model: nn.Module,
    run: Path,
    begun: RunState,
    checkpoint: Path | None,
    processes: Processes,
    shown: Reporter,
    stop: StopRequest,
) -> dict[str, Any]:
    recipe, updates, seed = task.recipe, task.recipe.schedule.updates, begun.seed
    add_devices(begun, processes.kind, run, shown.note)
    processes.from_first(lambda: _note(begun, run))
    history = _history(run, checkpoint) if checkpoint is not None else []
    shown.begin(f"{recipe.name} seed {seed}", 1, updates, history[-1]["update"] if history else 0)
    with Recorder(run if processes.is_first else None, history, by="update") as recorder:

        def tell(row: dict[str, Any]) -> None:
            _check_finite(row, recipe.optimizer.lr)
            history.append(row)
            recorder.add(row)
            shown.figures(row["update"], {name: value for name, value in row.items() if name != "update"})

        def saved() -> None:
            if processes.is_first:
                _note(begun.model_copy(update={"seconds": begun.seconds + time.perf_counter() - began}), run)

        watch = Watch(stop, processes, tell, saved)
        arguments = training_arguments(recipe, run, seed, processes.device, processes.count)
        trainer = TextTrainer(task, model, arguments, watch)
        on_cuda = processes.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(processes.device)
        began = time.perf_counter()
        with writing(run), quiet():
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        seconds = begun.seconds + time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(processes.device) if on_cuda else None
        trainer.release_graphs()
        if watch.stopped:
            raise Interrupted(stop.number or signal.SIGTERM)
    measured = {
        "ran_on": begun.ran_on,
        "seconds": seconds,
        "tokens": trainer.state.num_input_tokens_seen,
        "tokens_per_second": watch.tokens / watch.seconds if watch.tokens else None,
        "peak_memory": peak,
        "history": history,
    }
    return _finish(task, trainer, run, seed, processes, measured)


def _check_finite(row: dict[str, Any], lr: float) -> None:
    """Raise if the loss in a row of figures is not finite, or updates were skipped for their gradients."""
    loss, skipped = row.get("loss"), row.get("skipped")
    wrong = f"the gradients of {skipped} updates are not finite" if skipped else None
    wrong = wrong if loss is None or math.isfinite(loss) else f"the training loss is {loss:g}"
    if wrong is not None:
        raise ValueError(
            f"{wrong} at update {row['update']}; the checkpoint before it, if there was one, is kept. Try "
            f"optimizer.lr={lr / 3:.2g}"
        )


def _finish(
    task: TextTask, trainer: TextTrainer, run: Path, seed: int, processes: Processes, measured: dict[str, Any]
) -> dict[str, Any]:
    """Test and save a trained network, write the result, and return it."""
    recipe, network = task.recipe, trainer.network
    scores = task.test(network)
    result = {
        "task": recipe.task,
        "recipe": recipe.to_dict(),
        "seed": seed,
        "from_run": None if recipe.model.from_run is None else origin(recipe.model.from_run),
        "score": task.score,
        "scores": scores,
        "parameters": count_parameters(network),
        "machine": {
            **describe_machine(processes.device),
            "transformers": transformers.__version__,
            "processes": processes.count,
        },
        "data": {"name": task.corpus.name, "checksum": task.corpus.checksum},
        **measured,
    }
    with writing(run), quiet():
        if processes.is_first or recipe.run.shard:
            result["files"] = save_text_model(network, task.tokenizer, run, first=processes.is_first)
        if processes.is_first:
            whole = load_network(recipe.task, run) if recipe.run.shard else network  # no process holds a sharded one
            result["layers"] = layer_rows(whole)
            write_json(run / RESULT, result)  # written last: if it exists, everything else does
            shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)
    return result


def _last_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint that is complete: its state is written last."""
    found = [path for path in (run / CHECKPOINTS).glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)


def _history(run: Path, checkpoint: Path) -> list[dict[str, Any]]:
    """Return the rows of a run up to its checkpoint; a killed process, or a full disk, may have left half a line."""
    update = int(checkpoint.name.removeprefix("checkpoint-"))
    path = run / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if row["update"] <= update]


def _note(begun: RunState, run: Path) -> None:
    """Write what is trained in ``run``, by which devices, and for how many seconds up to its last checkpoint."""
    fields = begun.model_dump(include={"recipe", "seed", "data", "ran_on", "seconds"})
    write_text(run / BEGUN, json.dumps(fields))


def _begun(run: Path, recipe: TextRecipe, seed: int, corpus: Corpus) -> RunState | None:
    """Return what is trained in ``run``, after checking that it is the same recipe, seed and data; None if nothing."""
    path = run / BEGUN
    if not path.is_file():
        return None
    try:
        state = RunState(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{path} is damaged; {REMEDY}") from None
    check_same_run(state, recipe.to_dict(), seed, corpus.checksum, run)
    return state
