"""What only a GPU can show: captured passes that train as the same passes do without a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from factorized.experiments.text.captured import CapturedPasses
from factorized.experiments.text.task import Batch
from factorized.experiments.text.train import train_text
from tests.experiments.text.small import small, write_pairs_of_many_lengths
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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [(), ("factorize.scheme=low_rank", "factorize.rank=4", "factorize.attention=heads")]
)
def test_a_captured_translator_ends_where_one_without_graphs_does(
    tmp_path: Path, changes: tuple[str, ...], precision: str
) -> None:
    write_pairs_of_many_lengths(tmp_path)
    always = ("decay.kind=frobenius", "run.tokens=100", "run.label_smoothing=0.1", "schedule.updates=20")
    results = []
    for graph in ("auto", "no"):
        run = (f"run.graph={graph}", f"run.precision={precision}")
        recipe, corpus = small("translation", tmp_path, *always, *run, *changes)
        results += train_text(recipe, corpus, tmp_path / graph, device="cuda")
    close = 1e-3 if precision == "float32" else 3e-2  # products of other sizes are rounded in another way
    for captured, plain in zip(results[0]["history"], results[1]["history"], strict=True):
        assert captured == pytest.approx(plain, rel=close)


class Learner:
    """A network with dropout whose pass is captured for batches of many shapes."""

    def __init__(self, dropout: float) -> None:
        layers = (torch.nn.Linear(1024, 1024), torch.nn.Dropout(dropout), torch.nn.Linear(1024, 1))
        self.network = torch.nn.Sequential(*layers).cuda()
        self.passes = CapturedPasses(self.run, self.network.parameters(), torch.device("cuda"))

    def run(self, batch: Batch) -> torch.Tensor:
        loss = self.network(batch["x"]).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def test_graphs_in_shared_memory_give_each_batch_its_gradients_in_any_order() -> None:
    learner = Learner(0.0)
    parameters = list(learner.network.parameters())
    for rows in (3, 64, 3, 7, 64, 7, 3, 500, 3, 64):
        batch = {"x": torch.randn(rows, 1024, device="cuda")}
        loss = learner.passes(batch).clone()
        found = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        learner.network.zero_grad()
        wanted = learner.network(batch["x"]).square().mean()
        torch.testing.assert_close(loss, wanted.detach())
        torch.testing.assert_close(found, list(torch.autograd.grad(wanted, parameters)), rtol=1e-4, atol=1e-5)
        del wanted  # the next capture, on another stream, must not meet this graph
    learner.passes.release()


def test_every_replay_draws_dropout_again_and_warming_up_draws_none() -> None:
    learner, batches = Learner(0.5), [{"x": torch.ones(rows, 1024, device="cuda")} for rows in (3, 9, 3, 3, 9)]

    def losses() -> list[float]:
        torch.manual_seed(0)
        return [learner.passes(batch).item() for batch in batches]

    captured = losses()
    assert len(set(captured)) == len(captured)
    assert losses() == pytest.approx(captured, rel=1e-5)  # the second time nothing is captured
    learner.passes.release()


def test_graphs_after_the_first_hold_no_gradients() -> None:
    learner = Learner(0.0)
    held = []
    for rows in (32, 31, 30, 29):
        learner.passes({"x": torch.randn(rows, 1024, device="cuda")})
        learner.network.zero_grad()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[1] < 2**21  # half as much as the gradients
    learner.passes.release()
