from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F

from factorized.experiments.text.language import LanguageTask, continue_text
from factorized.experiments.text.models import build_text_model
from tests.experiments.text.small import small


def test_perplexity_counts_every_token_but_the_first_once_and_is_per_word(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path)
    task, model = LanguageTask(recipe, corpus), build_text_model(recipe, corpus.tokenizer, 0).double()
    (texts,) = corpus.texts["validation"]
    tokens = torch.from_numpy(texts.tokens.astype("int64"))
    total, count, length = 0.0, 0, recipe.data.length
    for start in range(0, len(tokens) - 1, length - 1):
        part = tokens[start : start + length]
        logits = model(input_ids=part[None]).logits[0, :-1]
        total += F.cross_entropy(logits.float(), part[1:], reduction="sum").item()
        count += len(part) - 1
    assert count == len(tokens) - 1
    found = task.validate(model)
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / texts.words), rel=1e-4)
    assert model.training is False or task.validate(model) == found


def test_perplexity_is_per_word_in_every_vocabulary(tmp_path: Path) -> None:
    texts = {}
    for vocabulary in (270, 290):
        recipe, corpus = small("language", tmp_path, f"data.vocabulary={vocabulary}")
        (texts[vocabulary],) = corpus.texts["validation"]
        model = build_text_model(recipe, corpus.tokenizer, 0)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)  # every token is as likely as any other
        found = LanguageTask(recipe, corpus).validate(model)
        assert found["loss"] == pytest.approx(math.log(vocabulary), rel=1e-5)
        tokens_per_word = (len(texts[vocabulary].tokens) - 1) / texts[vocabulary].words
        assert found["perplexity"] == pytest.approx(vocabulary**tokens_per_word, rel=1e-3)
    assert texts[270].words == texts[290].words
    assert len(texts[270].tokens) > len(texts[290].tokens)


def test_perplexity_of_a_model_that_is_sure_and_wrong_is_a_number(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path)
    model: Any = build_text_model(recipe, corpus.tokenizer, 0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e5)
    found = LanguageTask(recipe, corpus).validate(model)
    assert found["loss"] > 1_000
    assert math.isfinite(found["perplexity"])


def test_the_training_loss_compares_the_prediction_at_each_token_with_the_next(tmp_path: Path) -> None:
    task = LanguageTask(*small("language", tmp_path))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    logits = torch.zeros(2, 3, 9)
    logits[:, :2].scatter_(2, tokens[:, 1:, None], 50.0)  # sure of the next token; of the last nothing is asked
    assert task.loss({"logits": logits}, tokens, torch.tensor(4)).item() == pytest.approx(0.0)
    assert task.loss({"logits": torch.zeros(2, 3, 9)}, tokens, torch.tensor(4)).item() == pytest.approx(math.log(9))


def test_labels_are_smoothed_in_training_as_the_recipe_says(tmp_path: Path) -> None:
    task = LanguageTask(*small("language", tmp_path, "run.label_smoothing=0.2"))
    tokens, logits = torch.tensor([[1, 2, 3]]), torch.randn(1, 3, 9)
    expected = F.cross_entropy(logits[0, :2], tokens[0, 1:], label_smoothing=0.2)
    torch.testing.assert_close(task.loss({"logits": logits}, tokens, torch.tensor(2)), expected)


def test_training_sequences_are_the_text_one_after_the_other(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path)
    task = LanguageTask(recipe, corpus)
    batch = task.collate([task.examples[0], task.examples[1]])
    (texts,) = corpus.texts["train"]
    assert batch["input_ids"].flatten().tolist() == texts.tokens[: 2 * recipe.data.length].tolist()
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path, "data.length=9000")
    with pytest.raises(ValueError, match=r"the training text has [\d,]+ tokens, fewer than one sequence"):
        _ = LanguageTask(recipe, corpus).examples


def test_text_goes_on_from_a_prompt_and_from_nothing(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path)
    model = build_text_model(recipe, corpus.tokenizer, 0)
    text = continue_text(model, corpus.tokenizer, "one two", 5, draw=False)
    assert text.startswith("one two")
    assert text == continue_text(model, corpus.tokenizer, "one two", 5, draw=False)
    drawn = set()
    for seed in (0, 0, 1, 2):
        torch.manual_seed(seed)
        drawn.add(continue_text(model, corpus.tokenizer, "", 9, draw=True))
    assert len(drawn) == 3


def test_a_prompt_is_not_ended_before_it_goes_on(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path)
    model, tokenizer = build_text_model(recipe, corpus.tokenizer, 0), copy.deepcopy(corpus.tokenizer)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end[0]} $A {end[0]}", special_tokens=[end]
    )
    assert tokenizer("one two")["input_ids"][-1] == end[1]
    wanted = continue_text(model, corpus.tokenizer, "one two", 5, draw=False)
    assert continue_text(model, tokenizer, "one two", 5, draw=False) == wanted


def test_more_tokens_than_a_model_has_positions_are_named(tmp_path: Path) -> None:
    _, corpus = small("language", tmp_path)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(corpus.tokenizer), **sizes))
    assert continue_text(model, corpus.tokenizer, "one", 6, draw=False).startswith("one")
    with pytest.raises(ValueError, match=r"takes 8 tokens, and the text has \d, with 9 to add; ask for fewer --tokens"):
        continue_text(model, corpus.tokenizer, "one", 9, draw=False)
