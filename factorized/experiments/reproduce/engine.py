"""The interface of engines, which run jobs on this machine, on a Ray cluster or by Slurm; running planned jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from factorized.experiments.reproduce.job import Job, Outcome
from factorized.experiments.training.folder import writing
from factorized.experiments.training.record import write_json
from factorized.experiments.training.result import RESULT


class Engine(Protocol):
    """Runs jobs, several at once if there is room.

    An engine decides where and when; what a job does, and what it leaves behind, is ``run_job``'s.
    """

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yield how each job ended, in any order and as soon as it is known.

        A signal stops the jobs, which save themselves, and raises ``Interrupted``; the next call resumes them.
        """


def carry_out(waves: Sequence[Sequence[Job]], engine: Engine, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Run the jobs, one wave after the other, and return those that failed; ``tell`` is called with each that ended.

    A result is kept on this machine as soon as it is known.
    """
    failed = []
    for jobs in waves:
        for outcome in engine.run(jobs):
            _keep(outcome)
            tell(outcome)
            if outcome.error is not None:
                failed.append(outcome)
    return failed


def _keep(outcome: Outcome) -> None:
    """Write the results of a machine that does not share its disk with this one."""
    for result in outcome.results:
        run = Path(outcome.job.folder) / f"seed-{result['seed']}"
        if not (run / RESULT).is_file():
            with writing(run):
                run.mkdir(parents=True, exist_ok=True)
                write_json(run / RESULT, result)
