"""The recipes that need no download reach their figures on a CPU."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.corpus import load_corpus
from factorized.experiments.text.embedded import number_words
from factorized.experiments.text.train import train_text
from factorized.experiments.text.trained import load_text_run
from factorized.experiments.text.translation import translate_texts


def _scores(name: str, folder: Path, *changes: str) -> dict[str, float]:
    recipe = load_any_recipe(name, changes)
    assert isinstance(recipe, TextRecipe)
    corpus = load_corpus(recipe, None, folder / "packed")
    (result,) = train_text(recipe, corpus, folder / "run", device="cpu")
    return result["scores"]


@pytest.mark.nightly
def test_number_words_are_translated_short_ones_too(tmp_path: Path) -> None:
    assert _scores("translation/numbers", tmp_path)["bleu"] > 98
    _, _, model, tokenizer = load_text_run(tmp_path / "run" / "seed-0")
    below_100 = {pair for pair in number_words("train") if "hundert" not in pair[0] and "tausend" not in pair[0]}
    sources, targets = zip(*sorted(below_100), strict=True)
    found = translate_texts(model, tokenizer, sources, beam=5, longest=60)
    assert sum(map(operator.eq, found, targets)) >= 95  # of 97


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["bert/tiny-flambe", "bert/tiny-0.5-flambe"])
def test_a_tiny_bert_learns_pythons_documentation(tmp_path: Path, name: str) -> None:
    assert _scores(name, tmp_path)["loss"] < 6.0  # a guess among 2,000 word pieces is 7.6


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["language/tiny", "language/tiny-lowrank-0.5-si-fd"])
def test_a_tiny_language_model_learns_pythons_documentation(tmp_path: Path, name: str) -> None:
    assert _scores(name, tmp_path)["loss"] < 5.5  # a guess among 2,000 tokens is 7.6


def test_a_tiny_bert_begins_to_learn_in_a_few_updates(tmp_path: Path) -> None:
    changes = (
        "schedule.updates=40",
        "run.evaluate_every=20",
        "model.hidden=32",
        "model.feed_forward=64",
        "run.batch=8",
    )
    assert _scores("bert/tiny-flambe", tmp_path, *changes, "optimizer.lr=2e-2")["loss"] < 7.3
