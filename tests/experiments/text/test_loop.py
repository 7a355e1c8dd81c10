"""How an update is computed: in parts, in bfloat16, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as F

from factorized.experiments.recipes.find import check_text_recipe, load_any_recipe, merge
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text import masked, questions, translation
from factorized.experiments.text.corpus import Corpus, load_corpus
from factorized.experiments.text.task import padded, sum_of_losses
from factorized.experiments.text.train import train_text
from factorized.experiments.text.trained import load_text_run
from factorized.experiments.text.trainer import TextTrainer
from tests.experiments.text.sharded_worker import mask_every_third
from tests.experiments.text.small import BY_TASK, SMALL, small, train_until
from tests.experiments.text.small_squad import TINY, small_corpus

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch, where it compiles what follows a graph
TASKS = ("language", "masked", "translation", "questions")


def prepare(task: str, folder: Path, **run: Any) -> tuple[TextRecipe, Corpus]:
    """Return a small recipe with these fields of ``run``, and its corpus."""
    if task == "questions":
        changes = {"schedule": {"updates": 4}, "optimizer": {"name": "sgd", "lr": 0.1}, "run": run}
        recipe = check_text_recipe(merge(TINY, changes), "small")
        return recipe, small_corpus(folder, recipe)
    recipe, corpus = small(task, folder, "optimizer.name=sgd", "optimizer.lr=0.1")
    return recipe.model_copy(update={"run": recipe.run.model_copy(update=run)}), corpus


@pytest.fixture
def same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what a network reads the same however a batch is divided: masks are not drawn, and windows equally long."""
    monkeypatch.setattr(masked, "mask_tokens", mask_every_third)
    monkeypatch.setattr(
        questions, "padded", lambda rows, pad: padded([*rows, [pad] * TINY["data"]["length"]], pad)[:-1]
    )


@pytest.mark.usefixtures("same_inputs")
@pytest.mark.parametrize(
    ("task", "smoothing"),
    [(task, smoothing) for task in TASKS for smoothing in ((0.0,) if task == "questions" else (0.0, 0.1))],
)
def test_a_batch_in_four_parts_gives_the_updates_of_a_whole_one(tmp_path: Path, task: str, smoothing: float) -> None:
    results, models = [], []
    for parts in (1, 4):
        recipe, corpus = prepare(task, tmp_path, accumulate=parts, label_smoothing=smoothing)
        (result,) = train_text(recipe, corpus, tmp_path / f"parts-{parts}", device="cpu")
        results.append(result)
        models.append(load_text_run(tmp_path / f"parts-{parts}" / "seed-0")[2].state_dict())
    assert len(results[0]["history"]) > 4
    for whole, parted in zip(results[0]["history"], results[1]["history"], strict=True):
        assert parted == pytest.approx(whole, rel=1e-4)
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-3, atol=1e-4)


def test_a_batch_of_pairs_comes_in_parts_that_follow_each_other() -> None:
    lengths = translation.np.array([3, 4, 5, 6] * 25)
    whole = list(translation.TokenBatches(lengths, 40, seed=0))
    parts = list(translation.TokenBatches(lengths, 40, seed=0, parts=4))
    together = [
        sorted(number for part in parts[start : start + 4] for number in part) for start in range(0, len(parts), 4)
    ]
    assert together == [sorted(batch) for batch in whole if len(batch) >= 4]
    with pytest.raises(
        ValueError, match=r"run\.tokens = 23 is less than the longest pair, 6 tokens, times 4 parts of a"
    ):
        translation.TokenBatches(lengths, 23, seed=0, parts=4)


def test_the_loss_is_that_of_torch_and_ignores_what_is_not_to_be_predicted() -> None:
    logits, labels = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(7, (2, 5))
    labels[0, :3] = -100
    for smoothing in (0.0, 0.2):
        expected = F.cross_entropy(logits.float()[labels != -100], labels[labels != -100], label_smoothing=smoothing)
        torch.testing.assert_close(sum_of_losses(logits, labels, smoothing), 7 * expected)


def test_bfloat16_trains_and_leaves_figures_and_weights_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    real = torch.nn.Linear.forward

    def noted(self: torch.nn.Linear, input: Tensor) -> Tensor:
        output = real(self, input)
        types[torch.is_grad_enabled()].add(output.dtype)
        return output

    monkeypatch.setattr(torch.nn.Linear, "forward", noted)
    recipe, corpus = prepare("language", tmp_path, precision="bfloat16")
    (result,) = train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert types == {True: {torch.bfloat16}, False: {torch.float32}}
    losses = [row["loss"] for row in result["history"] if "loss" in row]
    assert losses[-1] < losses[0]
    _, _, model, _ = load_text_run(tmp_path / "run" / "seed-0")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    whole, _ = prepare("language", tmp_path, precision="float32")
    (exact,) = train_text(whole, corpus, tmp_path / "whole", device="cpu")
    assert result["scores"]["loss"] == pytest.approx(exact["scores"]["loss"], rel=1e-2)


@pytest.fixture
def graphs() -> Iterator[Any]:
    """Return a function that counts the graphs compiled so far, in a compiler that starts fresh."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.nightly
@pytest.mark.usefixtures("same_inputs")
@pytest.mark.parametrize("task", TASKS)
def test_a_compiled_network_learns_what_an_eager_one_does(tmp_path: Path, task: str, graphs: Any) -> None:
    results = []
    for compile in (False, True):
        recipe, corpus = prepare(task, tmp_path, compile=compile)
        assert graphs() == 0
        (result,) = train_text(recipe, corpus, tmp_path / f"compile-{compile}", device="cpu")
        results.append(result)
    assert graphs() > 0
    for eager, compiled in zip(results[0]["history"], results[1]["history"], strict=True):
        assert compiled == pytest.approx(eager, rel=1e-3)
    names = [set(load_text_run(tmp_path / f"compile-{c}" / "seed-0")[2].state_dict()) for c in (False, True)]
    assert names[0] == names[1]


def _compile_without_inductor(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Trace as ``torch.compile`` does, and run the graphs as they are: guards are the same, and it is quick.

    Returns a list that what is compiled is added to.
    """
    real, compiled = torch.compile, []

    def traced(model: Any, **settings: Any) -> Any:
        compiled.append(model)
        return real(model, **(settings | {"backend": "eager"}))

    monkeypatch.setattr(torch, "compile", traced)
    return compiled


@pytest.mark.nightly
def test_batches_of_many_shapes_compile_a_few_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: Any
) -> None:
    _compile_without_inductor(monkeypatch)
    shapes, compiled, real = set(), [], TextTrainer.training_step

    def noted(self: TextTrainer, model: Any, inputs: dict[str, Tensor], *others: Any) -> Tensor:
        loss = real(self, model, inputs, *others)
        shapes.add(tuple(tensor.shape for tensor in inputs.values()))
        compiled.append(graphs())
        return loss

    monkeypatch.setattr(TextTrainer, "training_step", noted)
    changes = (*SMALL, *BY_TASK["translation"], "run.compile=true", "schedule.updates=40", "run.evaluate_every=20")
    recipe = load_any_recipe("translation/numbers", changes)
    assert isinstance(recipe, TextRecipe)
    train_text(recipe, load_corpus(recipe, None, tmp_path / "packed"), tmp_path / "run", device="cpu")
    assert len(shapes) > 8
    assert compiled[-1] == compiled[20] > 0
    assert graphs() == compiled[-1]  # validation and translation are not compiled


@pytest.mark.parametrize("task", ["language", *(pytest.param(task, marks=pytest.mark.nightly) for task in TASKS[1:])])
def test_torch_s_cache_takes_the_program_of_an_update(
    tmp_path: Path, task: str, cacheable_programs: list[GraphModule]
) -> None:
    recipe, corpus = prepare(task, tmp_path, compile=True, precision="bfloat16")
    train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert cacheable_programs
    assert torch._functorch.config.backward_pass_autocast == "off"  # as backward passes run in eager mode


@pytest.mark.parametrize("task", ["language", "masked"])
def test_a_compiled_update_attends_without_masks(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch, graphs: Any
) -> None:
    masks: list[bool] = []

    def trace(graph: GraphModule, inputs: list[Any]) -> Any:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        masks.extend(node.kwargs.get("attn_mask") is not None for node in calls)
        return graph.forward

    real, networks, init = torch.compile, [], TextTrainer.__init__
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=trace))
    monkeypatch.setattr(
        TextTrainer,
        "__init__",
        lambda self, task, model, *others: (networks.append(model), init(self, task, model, *others))[1],
    )
    recipe, corpus = prepare(task, tmp_path, compile=True)
    train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert masks
    assert not any(masks)
    assert networks[0].config._attn_implementation == "sdpa"  # after training


def test_a_compiled_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: Any
) -> None:
    compiled = _compile_without_inductor(monkeypatch)
    recipe, corpus = prepare("language", tmp_path, compile=True)
    (whole,) = train_text(recipe, corpus, tmp_path / "whole", device="cpu")
    assert [each.__name__ for each in compiled] == ["_network_and_loss"]  # as one graph
    assert graphs() == 1
    train_until(3, recipe, corpus, tmp_path / "stopped", monkeypatch)
    (resumed,) = train_text(recipe, corpus, tmp_path / "stopped", device="cpu", resume=True)
    assert resumed["scores"] == whole["scores"]
    assert graphs() > 0
