"""What only a GPU can show: a captured pass that trains as the same compiled pass does without a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from factorized.experiments.text.train import train_text
from tests.experiments.text.small import small
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda


@pytest.mark.parametrize("task", ["language", "masked"])
def test_a_captured_run_ends_where_one_without_a_graph_does(tmp_path: Path, task: str) -> None:
    torch._dynamo.reset()
    changes = ("run.compile=true", "factorize.scheme=low_rank", "factorize.rank=4", "decay.kind=frobenius")
    results = []
    for graph in ("auto", "no"):
        recipe, corpus = small(task, tmp_path, *changes, f"run.graph={graph}")
        results += train_text(recipe, corpus, tmp_path / graph, device="cuda")
    for captured, plain in zip(results[0]["history"], results[1]["history"], strict=True):
        assert captured == pytest.approx(plain, rel=1e-4)
