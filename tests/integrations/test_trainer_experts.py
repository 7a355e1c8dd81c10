"""Mixtures of experts, which transformers saves under other names than its models have, with its ``Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import factorized as fz
from tests.integrations.test_trainer import TOKENS, Trainer, arguments, same

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # accelerate, without a GPU
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
EXPERTS = SIZES | {"vocab_size": 64, "num_key_value_heads": 2, "num_local_experts": 4}


def trainer(folder: Path, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS))
    data = [{"input_ids": row, "labels": row} for row in TOKENS % 64]
    made = arguments(folder, **settings)
    return Trainer(fz.factorize(model, ratio=0.6), made, train_dataset=data, eval_dataset=data)


def test_a_resumed_run_continues_with_the_experts_of_its_checkpoint(tmp_path: Path) -> None:
    whole, again = trainer(tmp_path), trainer(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert any("experts" in name for name, _ in whole.model.named_parameters())
    same(again.model, whole.model)
    same(fz.from_pretrained(transformers.MixtralForCausalLM, tmp_path / "checkpoint-6"), whole.model)


def test_the_best_model_has_the_experts_of_its_checkpoint(tmp_path: Path) -> None:
    settings = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # that of the first checkpoint
    best = trainer(tmp_path, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True, **settings)
    best.train()
    assert best.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    same(fz.from_pretrained(transformers.MixtralForCausalLM, tmp_path / "checkpoint-3"), best.model)
