"""Training a run's model further: its encoder in the form it was trained in, and its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from factorized.experiments.cli.text import plan_recipe, train_recipe
from factorized.experiments.recipes.find import check_text_recipe
from factorized.experiments.text.corpus import load_corpus
from factorized.experiments.text.from_run import origin
from factorized.experiments.text.network import build_text_network
from factorized.experiments.text.trained import load_text_run
from factorized.experiments.training.record import write_json
from factorized.experiments.training.result import read_result
from factorized.formats.product import LowRank
from factorized.surgery.compose import is_factorized
from factorized.surgery.factorize import factorize
from factorized.surgery.shrink import factorize_attention
from tests.experiments.text.small_squad import pretrained_run, recipe_of

INPUTS = torch.tensor([[2, 20, 21, 3, 30, 31, 32, 3]])


def low_rank(model: nn.Module) -> nn.Module:
    return factorize(model, LowRank(), rank=4, include=["*encoder*"])


def half_heads(model: nn.Module) -> nn.Module:
    return factorize_attention(model, 0.5)


@pytest.mark.parametrize("change", [lambda model: model, low_rank, half_heads])
def test_the_encoder_of_a_run_is_kept_as_it_is_under_a_new_head(
    tmp_path: Path, change: Callable[[nn.Module], nn.Module]
) -> None:
    run = pretrained_run(tmp_path, change)
    recipe = recipe_of({"model": {"from_run": str(run)}})
    _, _, before, tokenizer = load_text_run(run)
    model: Any = build_text_network(recipe, tokenizer, seed=0).eval()
    assert type(model).__name__ == "BertForQuestionAnswering"
    assert is_factorized(model) == is_factorized(before)
    encoder: Any = before.base_model
    with torch.no_grad():
        assert torch.equal(model.bert(INPUTS).last_hidden_state, encoder(INPUTS).last_hidden_state)
        again: Any = build_text_network(recipe, tokenizer, seed=0).eval()
        other: Any = build_text_network(recipe, tokenizer, seed=1).eval()
    assert torch.equal(model.qa_outputs.weight, again.qa_outputs.weight)
    assert not torch.equal(model.qa_outputs.weight, other.qa_outputs.weight)


def test_a_dense_run_can_be_factorized_for_its_new_task(tmp_path: Path) -> None:
    run = pretrained_run(tmp_path)
    recipe = recipe_of(
        {"model": {"from_run": str(run)}, "factorize": {"scheme": "low_rank", "rank": 4, "include": ["*encoder*"]}}
    )
    assert is_factorized(build_text_network(recipe, load_text_run(run)[3], seed=0))


def test_a_run_of_the_same_task_is_trained_further_whole(tmp_path: Path) -> None:
    run = pretrained_run(tmp_path)
    before, _, model, tokenizer = load_text_run(run)
    table = before.to_dict()
    table["model"]["from_run"] = str(run)
    further = build_text_network(check_text_recipe(table, "further"), tokenizer, seed=0)
    for name, value in model.state_dict().items():
        assert torch.equal(further.state_dict()[name], value)


def test_the_plan_of_a_recipe_is_that_of_its_run(tmp_path: Path) -> None:
    run = pretrained_run(tmp_path, low_rank)
    _, plan = plan_recipe(recipe_of({"model": {"from_run": str(run)}}))
    assert plan is not None
    assert "bert.encoder.layer.1.intermediate.dense" in {entry.name for entry in plan.layers}


def test_the_tokenizer_is_that_of_the_run(tmp_path: Path) -> None:
    run = pretrained_run(tmp_path)
    recipe = recipe_of({"model": {"from_run": str(run)}})
    folder = tmp_path / "squad"
    (folder / "train.json").write_text((folder / "dev.json").read_text())  # another text would give other tokens
    corpus = load_corpus(recipe, folder, tmp_path / "other")
    assert corpus.tokenizer.get_vocab() == load_text_run(run)[3].get_vocab()
    assert not list((tmp_path / "other").glob("tokenizer-*"))  # nothing was learned
    (run / "model/tokenizer.json").unlink()
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is missing, though result\.json names it; train the run again"
    ):
        load_corpus(recipe, folder, tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"length": 65}}, "data.length = 65 is more than the 64 positions of model.from_run = .*pre-train"),
        ({"model": {"hidden": 32}}, "model.hidden = 32, but model.from_run = .* has 16; remove model.hidden"),
        ({"data": {"vocabulary": 121}}, "data.vocabulary = 121, but .* has 120; remove data.vocabulary"),
        (
            {"factorize": {"scheme": "low_rank", "rank": 3}},
            "is factorized already, in another way .* remove .factorize",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_the_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = pretrained_run(tmp_path, low_rank)
    model = {"from_run": str(run), **changes.pop("model", {})}
    with pytest.raises(ValueError, match=message):
        build_text_network(recipe_of({"model": model, **changes}), load_text_run(run)[3], seed=0)


def test_a_run_that_pretrained_nothing_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of({"model": {"from_run": str(tmp_path / "none")}})
    with pytest.raises(
        ValueError, match=r"model.from_run = .*: there is no .*none/result.json; give the folder of a finished run"
    ):
        load_corpus(recipe, pretrained_run(tmp_path).parent / "squad", tmp_path / "cache")
    run = tmp_path / "pretrained"
    result = json.loads((run / "result.json").read_text())
    result["recipe"] |= {"task": "language", "model": {}, "data": {"length": 64}}
    write_json(run / "result.json", {key: value for key, value in result.items() if key != "checksum"})
    with pytest.raises(ValueError, match=r"is a run of task 'language'; give one of task 'masked'"):
        build_text_network(recipe_of({"model": {"from_run": str(run)}}), None, seed=0)


def test_the_origin_of_a_run_is_known_back_to_the_first(tmp_path: Path) -> None:
    run = pretrained_run(tmp_path)
    result = read_result(run)
    write_json(run / "result.json", {**result, "seed": 3, "from_run": {"recipe": {"name": "phase 1"}, "seed": 7}})
    assert origin(str(run)) == {
        "recipe": result["recipe"],
        "seed": 3,
        "from_run": {"recipe": {"name": "phase 1"}, "seed": 7},
    }


def test_each_seed_of_a_recipe_goes_on_from_the_run_of_that_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FACTORIZED_DATA", str(tmp_path / "data"))
    run = pretrained_run(tmp_path)
    for seed in (0, 2):
        shutil.copytree(run, tmp_path / f"runs/seed-{seed}")
    recipe = recipe_of({"model": {"from_run": str(tmp_path / "runs/seed-{seed}")}})
    train = partial(
        train_recipe,
        recipe,
        str(tmp_path / "squad"),
        tmp_path / "out",
        device=torch.device("cpu"),
        resume=False,
        overwrite=False,
        allow_other_devices=False,
        quiet=True,
    )
    assert [result["seed"] for result in train(seeds=(0, 2))] == [0, 2]
    for seed in (0, 2):
        result = read_result(tmp_path / "out" / f"seed-{seed}")
        assert result["recipe"]["model"]["from_run"].endswith(f"runs/seed-{seed}")
    with pytest.raises(ValueError, match=r"runs/seed-1': there is no .*; give the folder of a finished run"):
        train(seeds=(1,))
