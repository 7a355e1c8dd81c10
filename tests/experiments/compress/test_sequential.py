"""A compression whose layers make up for the errors of those before them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import factorized as fz
from factorized.experiments.compress.work import Settings, Work
from tests.experiments.compress.points import Points


def test_layers_are_filled_one_after_another_on_request(tmp_path: Path) -> None:
    settings, subject = Settings(ratio=0.5, sequential=True), Points()
    work = Work(subject, settings, tmp_path, say=lambda line: None)
    work.run(None)
    init = fz.Calibrated(subject.batches(settings.samples), sequential=True)
    expected = fz.factorize(subject.dense(), work.plan, init=init)
    torch.testing.assert_close(subject.load(tmp_path / "compressed").state_dict(), expected.state_dict())
    with pytest.raises(ValueError, match="sequential"):  # that is another compression
        Work(subject, Settings(ratio=0.5), tmp_path)
