"""A job: a recipe to be trained with some seeds in one process, as plain data that can be sent to another machine."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from factorized.experiments.data.explain import in_words
from factorized.experiments.recipes.find import check_recipe, check_text_recipe
from factorized.experiments.reproduce.data import corpus_of, images_of
from factorized.experiments.reproduce.runs import FAILURE, read_run
from factorized.experiments.training.folder import claimed
from factorized.experiments.training.interrupt import Interrupted, StopRequest
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.record import write_json
from factorized.experiments.training.trained import RESULT

Result = dict[str, Any]  # what a run's result.json holds


@dataclass(frozen=True)
class Job:
    """What one process trains; runs that are there are resumed."""

    recipe: dict[str, Any]
    seeds: tuple[int, ...]
    folder: str  # of its runs, which lie in seed-SEED
    data: str | None  # the folder of data sets
    checksum: str  # of the data that the runs were planned for

    @property
    def name(self) -> str:
        """The name of its recipe."""
        return str(self.recipe["name"])

    def by_seed(self) -> list[Job]:
        """Return a job for each seed."""
        return [replace(self, seeds=(seed,)) for seed in self.seeds]


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its results, and the error that kept it from having more."""

    job: Job
    results: Sequence[Result]
    error: str | None = None


def run_job(job: Job, device: str | None = None, reporter: Reporter | None = None) -> Outcome:
    """Train what a job says, resuming what is there; an error ends the job and not the process.

    It is left beside the metrics of its run, for the report. A signal stops the job as it stops ``factorized train``:
    with ``Interrupted``, after saving.
    """
    folder = Path(job.folder)
    try:
        return Outcome(job, _train(job, folder, device, reporter))
    except Interrupted:
        raise
    except Exception as error:
        message = in_words(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        results, left = _finished(job, folder)
        if left is not None:
            _note_failure(job, folder / f"seed-{left}", left, message)
        return Outcome(job, results, message)
    finally:
        # The next job has another network: compiled code of this one would count against torch's limit of recompiles.
        torch.compiler.reset()
        gc.collect()


def _train(job: Job, folder: Path, device: str | None, reporter: Reporter | None) -> list[Result]:
    with StopRequest() as stop:  # also while data are read; training listens by itself
        if "task" in job.recipe:
            from factorized.experiments.text.train import train_text

            text = check_text_recipe(job.recipe, job.name)
            corpus = corpus_of(text, job.data)
            _check_data(job, corpus.checksum)
            _check_stop(stop)
            return train_text(text, corpus, folder, seeds=job.seeds, device=device, resume="auto", reporter=reporter)
        from factorized.experiments.training.train import train

        recipe = check_recipe(job.recipe, job.name)
        images = images_of(recipe, job.data)
        _check_data(job, images.checksum)
        _check_stop(stop)
        return train(recipe, images, folder, seeds=job.seeds, device=device, resume="auto", reporter=reporter)


def _check_data(job: Job, checksum: str) -> None:
    if checksum != job.checksum:
        raise ValueError(
            f"{job.name} was planned for data with checksum {job.checksum[:12]}…, and those here have "
            f"{checksum[:12]}…; give every machine the same data"
        )


def _check_stop(stop: StopRequest) -> None:
    if stop.number is not None:
        raise Interrupted(stop.number)


def _finished(job: Job, folder: Path) -> tuple[list[Result], int | None]:
    """Return the results that are there, and the first seed without one."""
    results: list[Result] = []
    for seed in job.seeds:
        path = folder / f"seed-{seed}" / RESULT
        if not path.is_file():
            return results, seed
        results.append(read_run(path).result)
    return results, None


def _note_failure(job: Job, run: Path, seed: int, message: str) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        with claimed(run):  # not beside the metrics of another process
            write_json(run / FAILURE, {"recipe": job.recipe, "seed": seed, "error": message})
    except (OSError, ValueError):
        return  # the outcome has the message too
