"""Jobs by submitit, in its executor for one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from factorized.experiments.reproduce.on_slurm import SlurmEngine
from tests.experiments.reproduce.small_table import TABLE, jobs, runs_in


@pytest.mark.nightly
def test_every_seed_is_a_job_of_its_own_and_an_error_is_its_outcome(tmp_path: Path) -> None:
    good = jobs(tmp_path, seeds=2, length=1)[1]
    bad = jobs(tmp_path, length=1, text=TABLE.replace("[columns]", "optimizer.lr = 1e30\n[columns]"))[0]
    engine = SlurmEngine(tmp_path / "logs", cluster="local", gpus=0, settings={"timeout_min": 5})
    outcomes = {(outcome.job.name, outcome.job.seeds): outcome for outcome in engine.run([good, bad])}
    assert set(outcomes) == {(good.name, (0,)), (good.name, (1,)), (bad.name, (0,))}
    assert "the training loss is nan" in (outcomes[bad.name, (0,)].error or "")
    assert [outcomes[good.name, (seed,)].results[0]["seed"] for seed in (0, 1)] == [0, 1]
    assert {run.name for run in runs_in(tmp_path / "out")} == {good.name}


def test_a_parameter_that_submitit_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--slurm: .*wrong_word.*; see submitit's parameters"):
        SlurmEngine(tmp_path, cluster="local", settings={"wrong_word": 1})
