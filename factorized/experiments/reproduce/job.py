"""A job: a recipe to be trained with some seeds in one process, as plain data that can be sent to another machine."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from factorized.experiments.recipes.find import check_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.reproduce.data import corpus_of, images_of
from factorized.experiments.reproduce.runs import read_run
from factorized.experiments.training.folder import FAILURE, claimed
from factorized.experiments.training.interrupt import Interrupted, StopRequest
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.record import write_json
from factorized.experiments.training.result import RESULT, Result
from factorized.experiments.training.turns import RunsFailed, message_of

AtOnce = int | Literal["auto"]  # runs that take turns in one process


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
    """How a job ended: its results, and the error that stopped it, if any."""

    job: Job
    results: Sequence[Result]
    error: str | None = None


def run_job(job: Job, device: str | None = None, reporter: Reporter | None = None, at_once: AtOnce = 1) -> Outcome:
    """Train what a job says, ``at_once`` of its seeds, resuming what is there; an error ends no more than the job.

    It is left beside the metrics of its run, for the report. A signal stops the job as it stops ``factorized train``:
    with ``Interrupted``, after saving.
    """
    folder = Path(job.folder)
    try:
        with StopRequest() as stop:  # before training and after it; training listens by itself
            results = _train(job, folder, device, reporter, at_once, stop)
            stop.check()
        return Outcome(job, results)
    except Interrupted:
        raise
    except Exception as error:
        results, left = _finished(job, folder)
        failed = error.errors if isinstance(error, RunsFailed) else dict.fromkeys(left[:1], error)
        for seed, reason in failed.items():
            _note_failure(job, folder / f"seed-{seed}", seed, message_of(reason))
        return Outcome(job, results, message_of(error))
    finally:
        # The next job has another network: compiled code of this one would count against torch's limit of recompiles.
        torch.compiler.reset()
        gc.collect()


def _train(
    job: Job, folder: Path, device: str | None, reporter: Reporter | None, at_once: AtOnce, stop: StopRequest
) -> list[Result]:
    recipe = check_any_recipe(job.recipe, job.name)
    if isinstance(recipe, TextRecipe):
        from factorized.experiments.text.train import train_text

        corpus = corpus_of(recipe, job.data)
        _check_data(job, corpus.checksum)
        stop.check()
        return train_text(recipe, corpus, folder, seeds=job.seeds, device=device, resume="auto", reporter=reporter)
    from factorized.experiments.training.train import train

    images = images_of(recipe, job.data)
    _check_data(job, images.checksum)
    stop.check()
    return train(
        recipe,
        images,
        folder,
        seeds=job.seeds,
        at_once=at_once,
        device=device,
        resume="auto",
        reporter=reporter,
    )


def _check_data(job: Job, checksum: str) -> None:
    if checksum != job.checksum:
        raise ValueError(
            f"{job.name} was planned for data with checksum {job.checksum[:12]}…, and those here have "
            f"{checksum[:12]}…; give every machine the same data"
        )


def _finished(job: Job, folder: Path) -> tuple[list[Result], list[int]]:
    """Return the results that are there, and the seeds without one that can be read."""
    results, left = [], []
    for seed in job.seeds:
        try:
            results.append(read_run(folder / f"seed-{seed}" / RESULT).result)
        except ValueError:
            left.append(seed)
    return results, left


def _note_failure(job: Job, run: Path, seed: int, message: str) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        with claimed(run):  # not beside the metrics of another process
            write_json(run / FAILURE, {"recipe": job.recipe, "seed": seed, "error": message})
    except (OSError, ValueError):
        return  # the outcome has the message too
