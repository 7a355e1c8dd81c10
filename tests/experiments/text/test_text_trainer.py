"""A recipe as arguments of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text import trainer
from factorized.experiments.text.network import build_text_network
from factorized.experiments.text.train import train_text
from factorized.experiments.text.trained import load_text_run
from tests.experiments.text.small import small

CPU = torch.device("cpu")


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the trainer's arguments are made from; they cannot be made for a device that is not there."""
    given: dict[str, Any] = {}

    def note(**fields: Any) -> None:
        given.update(fields)

    monkeypatch.setattr(trainer, "TrainingArguments", note)
    return given


def make(*changes: str, name: str = "language/tiny", processes: int = 1) -> None:
    recipe = load_any_recipe(name, changes)
    assert isinstance(recipe, TextRecipe)
    trainer.training_arguments(recipe, Path("run"), 7, CPU, processes)


def test_batches_are_shared_by_parts_and_processes(arguments: dict[str, Any]) -> None:
    make("run.batch=24", "run.accumulate=3", processes=4)
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (2, 3)
    assert arguments["dataloader_drop_last"]  # a smaller batch at the end would be a mean over fewer tokens
    with pytest.raises(
        ValueError, match=r"run\.batch = 24 cannot be shared by 5 processes, 3 parts each; make it a multiple of 15"
    ):
        make("run.batch=24", "run.accumulate=3", processes=5)


def test_batches_of_pairs_are_not_filled_up(arguments: dict[str, Any]) -> None:
    make(name="translation/numbers", processes=3)  # accelerate would repeat pairs of the first batches
    assert arguments["accelerator_config"] == {"even_batches": False}


def test_draws_and_order_depend_on_the_seed_and_one_checkpoint_is_kept(arguments: dict[str, Any]) -> None:
    make()
    assert (arguments["seed"], arguments["data_seed"], arguments["save_total_limit"]) == (7, 7, 1)
    assert arguments["logging_nan_inf_filter"] is False  # it would show the last good loss in place of NaN


def test_the_gradient_is_clipped_to_the_recipes_norm(tmp_path: Path) -> None:
    moved = []
    for clip in (1e-3, 2e-3):
        changes = ("optimizer.name=sgd", "optimizer.lr=1", "optimizer.momentum=0", f"optimizer.clip={clip}")
        schedule = ("schedule.updates=1", "schedule.warmup=0", "schedule.shape=constant", "decay.kind=none")
        recipe, corpus = small("language", tmp_path, *changes, *schedule)
        train_text(recipe, corpus, tmp_path / f"clip-{clip}", device="cpu")
        before = build_text_network(recipe, corpus.tokenizer, 0).state_dict()
        after = load_text_run(tmp_path / f"clip-{clip}" / "seed-0")[2].state_dict()
        names = [name for name in before if name != "lm_head.weight"]  # it is the embedding
        moved.append(torch.cat([(after[name] - before[name]).flatten() for name in names]).norm().item())
    assert moved == pytest.approx([1e-3, 2e-3], rel=1e-2)


def test_seeds_of_one_command_are_networks_and_orders_of_their_own(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path, "schedule.updates=2")
    both = train_text(recipe, corpus, tmp_path / "both", seeds=(0, 1), device="cpu")
    (alone,) = train_text(recipe, corpus, tmp_path / "alone", seeds=(1,), device="cpu")
    assert [result["seed"] for result in both] == [0, 1]
    assert both[0]["scores"] != both[1]["scores"]
    assert both[1]["scores"] == alone["scores"]
