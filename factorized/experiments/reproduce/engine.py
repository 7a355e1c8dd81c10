"""The interface of engines, which run jobs: on this machine, on a Ray cluster or by Slurm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from factorized.experiments.reproduce.job import Job, Outcome


class Engine(Protocol):
    """Runs jobs, several at once where it has room.

    An engine decides where and when; what a job does, and what it leaves behind, is ``run_job``'s.
    """

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yield how each job ended, in any order and as soon as it is known.

        A signal stops the jobs, which save themselves, and raises ``Interrupted``; the next call resumes them.
        """
