from __future__ import annotations

from pathlib import Path

import pytest
import torch

from factorized.experiments.text.masked import MaskedTask, mask_tokens
from factorized.experiments.text.models import build_text_model
from factorized.experiments.text.task import IGNORED
from tests.experiments.text.small import small


def test_tokens_are_masked_in_the_shares_of_bert(tmp_path: Path) -> None:
    _, corpus = small("masked", tmp_path)
    tokenizer = corpus.tokenizer
    tokens = torch.randint(5, len(tokenizer), (400, 102))
    tokens[:, 0], tokens[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    torch.manual_seed(0)
    batch = mask_tokens(tokens, tokenizer, 0.15)
    positions, labels, inputs = batch["positions"], batch["labels"], batch["input_ids"]
    assert positions.shape == labels.shape == (400, 15)
    assert torch.equal(labels, tokens.gather(1, positions))
    guessed = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, positions, True)
    assert (guessed.sum(dim=1) == 15).all()
    assert not guessed[:, [0, -1]].any()
    assert guessed[:, 1:-1].any(dim=0).all()
    assert torch.equal(inputs[~guessed], tokens[~guessed])
    shown = inputs.gather(1, positions)
    assert (shown == tokenizer.mask_token_id).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (shown == labels).float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_a_sequence_always_has_a_token_to_guess(tmp_path: Path) -> None:
    _, corpus = small("masked", tmp_path)
    tokens = torch.full((50, 4), 7)
    assert mask_tokens(tokens, corpus.tokenizer, 0.001)["labels"].shape == (50, 1)


def test_validation_masks_in_one_fixed_way_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    recipe, corpus = small("masked", tmp_path)
    task, model = MaskedTask(recipe, corpus), build_text_model(recipe, corpus.tokenizer, 0)
    before = torch.random.get_rng_state()
    first = task.validate(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert task.validate(model) == first
    assert first["loss"] > 0


def test_sequences_begin_with_cls_and_end_with_sep(tmp_path: Path) -> None:
    recipe, corpus = small("masked", tmp_path, "data.mask=0.01")
    task = MaskedTask(recipe, corpus)
    batch = task.collate([task.examples[0]])
    assert batch["input_ids"].shape == (1, recipe.data.length)
    assert batch["input_ids"][0, 0] == corpus.tokenizer.cls_token_id
    assert batch["input_ids"][0, -1] == corpus.tokenizer.sep_token_id


def test_another_vocabulary_at_the_same_path_gives_another_tokenizer(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    _, first = small("masked", tmp_path, "data.vocabulary=vocab.txt")
    (tmp_path / "vocab.txt").write_text("\n".join([*words, "three"]))
    _, second = small("masked", tmp_path, "data.vocabulary=vocab.txt")
    assert (len(first.tokenizer), len(second.tokenizer)) == (7, 8)


def test_a_plain_model_gets_labels_for_all_of_its_logits(tmp_path: Path) -> None:
    recipe, corpus = small("masked", tmp_path)
    task = MaskedTask(recipe, corpus)
    batch = task.collate([task.examples[0], task.examples[1]])
    inputs, labels = task.for_plain_model(batch)
    assert set(inputs) == {"input_ids"}
    assert torch.equal(labels.gather(1, batch["positions"]), batch["labels"])
    assert int(labels.ne(IGNORED).sum()) == batch["labels"].numel()
    assert "labels" in batch  # it is left as it was
