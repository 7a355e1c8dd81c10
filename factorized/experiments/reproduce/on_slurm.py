"""Jobs on a Slurm cluster, queued by submitit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from factorized.experiments.data.explain import in_words
from factorized.experiments.reproduce.job import Job, Outcome, run_job
from factorized.experiments.training.interrupt import Interrupted, StopRequest

LOOK = 1.0  # seconds between two looks at the queue


class SlurmEngine:
    """A Slurm job for each seed; one that runs out of time is queued again by submitit, and resumed.

    ``settings`` are submitit's, such as ``{"slurm_partition": "gpu", "timeout_min": 240}``. ``cluster`` is "slurm", or
    "local" for processes on this machine, all at once. ``gpus`` are those of a job.
    """

    def __init__(
        self, logs: Path, *, cluster: str = "slurm", gpus: int = 1, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.device = None if gpus else "cpu"
        try:
            self.executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        except RuntimeError as error:
            raise ValueError(
                f"--engine slurm: {in_words(error)} Run the command where Slurm is, or try it on this machine with "
                "--slurm cluster=local, which starts all runs at once"
            ) from None
        try:
            self.executor.update_parameters(name="factorized", gpus_per_node=gpus, **(settings or {}))
        except (TypeError, NameError) as error:
            raise ValueError(f"--slurm: {in_words(error)}; see submitit's parameters") from None

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yield how each job ended."""
        apart = [one for job in jobs for one in job.by_seed()]
        task = Resumable()  # type: ignore[no-untyped-call]
        with StopRequest() as stop:
            with self.executor.batch():
                submitted = [self.executor.submit(task, one, self.device) for one in apart]
            waiting = dict(zip(submitted, apart, strict=True))
            while waiting:
                for done in [job for job in waiting if job.done()]:
                    yield _outcome(done, waiting.pop(done))
                if stop.number is not None:
                    for job in waiting:
                        job.cancel()  # by SIGTERM, on which training saves itself
                    raise Interrupted(stop.number)
                if waiting:
                    time.sleep(LOOK)


class Resumable(submitit.helpers.Checkpointable):
    """``run_job`` as submitit queues it again when its time is over."""

    def __call__(self, job: Job, device: str | None) -> Outcome:
        """Run the job."""
        return run_job(job, device)


def _outcome(done: submitit.Job[Outcome], job: Job) -> Outcome:
    try:
        return done.result()
    except Exception as error:  # of several kinds: jobs that failed, were killed or left nothing
        return Outcome(job, [], f"Slurm job {done.job_id}: {in_words(error)[:400]}")
