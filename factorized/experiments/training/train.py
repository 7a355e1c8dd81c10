"""Train a recipe with several seeds: folders, turns on one device, interruptions, failures."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from factorized.experiments.data.images import Images
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.folder import prepare_folders
from factorized.experiments.training.interrupt import PATIENCE, StopRequest
from factorized.experiments.training.network import Start
from factorized.experiments.training.processes import joined_processes
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.result import Result
from factorized.experiments.training.trainer import Trainer
from factorized.experiments.training.turns import Queue, RunsFailed, Turn, take_turns


def train(
    recipe: Recipe,
    images: Images,
    folder: Path,
    *,
    seeds: Sequence[int] = (0,),
    at_once: int | Literal["auto"] = 1,
    device: torch.device | str | None = None,
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    allow_other_devices: bool = False,
    reporter: Reporter | None = None,
    start: Start | None = None,
) -> list[Result]:
    """Train the recipe's network once for each seed, into ``folder/seed-<seed>``, and return the results.

    ``resume`` continues the runs that are there and is refused where there is none; ``"auto"`` then starts one. A
    run that began with another number of processes, or on another kind of device, would not end where it would have
    ended there: continuing it is refused unless ``allow_other_devices`` is set. ``start`` is trained in place of the
    recipe's own network, with one seed.

    Seeds share one copy of the data and, on a GPU, the compiled step. ``at_once`` of them take turns to issue steps, on
    separate CUDA streams: a small network leaves a GPU idle. ``"auto"`` is three for such a network on a GPU,
    and one elsewhere. Each run ends where it would have ended alone. One that fails leaves the others going, and
    ``RunsFailed`` is raised at the end; one after another, the first error ends them all.

    Under ``torchrun`` every process calls this and trains on its share of each batch; the first one writes.
    """
    if not seeds or len(set(seeds)) != len(seeds) or not 0 <= min(seeds) <= max(seeds) < 2**63:
        raise ValueError(f"seeds must be different whole numbers from 0 to 2**63 - 1, at least one, got {list(seeds)}")
    if start is not None and len(seeds) > 1:
        raise ValueError(f"start is one network, trained with one seed, got seeds {list(seeds)}")
    if at_once != "auto" and at_once < 1:
        raise ValueError(f"at_once must be 'auto' or a number of runs of at least 1, got {at_once}")
    folders = {seed: folder / f"seed-{seed}" for seed in seeds}
    with joined_processes(device) as processes, ExitStack() as claims:
        if processes.count > 1 and at_once not in (1, "auto"):
            raise ValueError(
                f"at_once={at_once} is for one process, and there are {processes.count}, which train each run together"
            )
        shown = reporter if reporter is not None and processes.is_first else Reporter(quiet=True)
        claims.enter_context(shown)
        in_turn = len(seeds) > 1 and at_once != 1 and processes.count == 1
        if in_turn and recipe.data.place == "device":
            images = images.to(processes.device)  # one copy for all of them
        build = partial(
            Trainer,
            recipe,
            images,
            processes,
            allow_other_devices=allow_other_devices,
            progress=shown.decomposing,
            start=start,
        )
        first: AbstractContextManager[None] = Turn(processes.device) if in_turn else nullcontext()
        with first:
            trainer = build(seeds[0])
        processes.from_first(
            lambda: prepare_folders(
                list(folders.values()), trainer.bytes_to_write, claims, resume=resume, overwrite=overwrite
            )
        )
        count = min(len(seeds), (trainer.runs_at_once if at_once == "auto" else at_once) if in_turn else 1)
        with StopRequest(PATIENCE if processes.count > 1 else 0.0) as stop:

            def begin(trainer: Trainer, seed: int, reporter: Reporter) -> Generator[None, None, Result]:
                return trainer.run(seed, folders[seed], bool(resume), reporter, stop, count)

            def fits(trainer: Trainer, seed: int) -> bool:
                return seed == trainer.seed or not recipe.factorize.depends_on_weights  # else it has other ranks

            queue = Queue(seeds, build, fits, begin, go_on=count > 1)
            others = [(Turn(processes.device), queue.work(None, copy(shown))) for _ in range(count - 1)]
            take_turns([(first, queue.work(trainer, shown)), *others])
    if queue.errors:
        raise RunsFailed(queue.errors, folder) from next(iter(queue.errors.values()))
    return [queue.results[seed] for seed in seeds]
