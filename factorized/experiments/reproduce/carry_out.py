"""Runs planned jobs on an engine, wave by wave, and keeps each result on this machine as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from factorized.experiments.reproduce.engine import Engine
from factorized.experiments.reproduce.job import Job, Outcome
from factorized.experiments.training.folder import writing
from factorized.experiments.training.record import write_json
from factorized.experiments.training.trained import RESULT


def carry_out(waves: Sequence[Sequence[Job]], engine: Engine, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Run the jobs, one wave after the other, and return those that failed; ``tell`` learns of each job that ended."""
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
