"""Jobs on a Ray cluster, or on a local one that is started for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from factorized.experiments.data.explain import in_words
from factorized.experiments.reproduce.job import Job, Outcome, run_job
from factorized.experiments.training.interrupt import Interrupted, StopRequest

LOOK = 0.5  # seconds between two looks at whether to stop
RETRIES = 3  # of a job whose worker was lost; it resumes from its checkpoint where that can be seen
GOODBYE = 60.0  # seconds for stopped jobs to save themselves


class RayEngine:
    """A task for each seed, with a share of a GPU; a task whose worker is lost is run again by Ray.

    ``address`` is a cluster's, or "auto" for the one on this machine; without it, one is started for the jobs. ``gpus``
    is the share of a GPU for each task: 1 where the cluster has any, unless given.
    """

    def __init__(self, *, address: str | None = None, gpus: float | None = None, cpus: float = 1.0) -> None:
        self.address, self.gpus, self.cpus = address, gpus, cpus

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yield how each job ended, as its worker reports it."""
        mine = not ray.is_initialized()
        if mine:
            self._connect()
        share = self.gpus if self.gpus is not None else float(ray.cluster_resources().get("GPU", 0) > 0)
        task = ray.remote(run_job).options(num_cpus=self.cpus, num_gpus=share, max_retries=RETRIES)
        device = "cuda" if share else "cpu"
        try:
            with StopRequest() as stop:
                waiting = {task.remote(one, device): one for job in jobs for one in job.by_seed()}
                while waiting:
                    done, _ = ray.wait(list(waiting), timeout=LOOK)
                    yield from (self._outcome(reference, waiting.pop(reference)) for reference in done)
                    if stop.number is not None:
                        self._cancel(list(waiting))
                        raise Interrupted(stop.number)
        finally:
            if mine:
                ray.shutdown()

    def _connect(self) -> None:
        address = self.address or "local"  # without one, Ray would join, or wait for, a cluster that was here before
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level="error")
        except ConnectionError as error:
            raise ValueError(
                f"--address {address}: {in_words(error)}; start a cluster with `ray start --head`. If it asks "
                "for a token, set RAY_AUTH_MODE=token in the environment, or use --address auto on the cluster's "
                "machine"
            ) from None

    def _outcome(self, reference: Any, job: Job) -> Outcome:
        try:
            outcome: Outcome = ray.get(reference)
            return outcome
        except ray.exceptions.RayError as error:
            told = in_words(error)
            return Outcome(job, [], f"Ray lost it: {told[:200]}; give the same command once more")

    def _cancel(self, references: list[Any]) -> None:
        """Interrupt the tasks, as Ctrl-C would, and wait until they have saved themselves."""
        for reference in references:
            ray.cancel(reference, force=False)
        end = time.monotonic() + GOODBYE
        while references and time.monotonic() < end:
            _, references = ray.wait(references, num_returns=len(references), timeout=LOOK)
