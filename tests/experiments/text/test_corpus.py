"""A recipe's text from its files to arrays, in little memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.text import text_files, tokens
from factorized.experiments.text.corpus import corpus_checksum, load_corpus
from factorized.experiments.text.tokenizer import BERT
from tests.experiments.text.small import BY_TASK, SMALL, WORDS, files, small
from tests.experiments.text.small_squad import paragraph, recipe_of, table, write_squad

MEGABYTE = 2**20


@pytest.mark.parametrize("blank_lines", [True, False])
def test_a_text_larger_than_the_memory_it_may_take_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank_lines: bool
) -> None:
    monkeypatch.setattr(text_files, "LONGEST", 2**14)
    monkeypatch.setattr(tokens, "CHARACTERS", 2**14)
    line = " ".join(WORDS[number % 7] + WORDS[number % 9] for number in range(100)) + ("\n\n" if blank_lines else " ")
    repeats = 2 * MEGABYTE // len(line)
    (tmp_path / "train.txt").write_text(line * repeats)
    (tmp_path / "pieces.txt").write_text("\n".join(BERT.values()))
    changes = ('data.train=["train.txt"]', 'data.vocabulary="pieces.txt"')
    recipe: Any = load_any_recipe("bert/tiny", (*SMALL, "data.length=16", "run.batch=4", *changes))
    small("masked", tmp_path / "other")  # so that what is imported does not count
    tracemalloc.start()
    try:
        corpus = load_corpus(recipe, tmp_path, tmp_path / "packed")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEGABYTE
    held, kept = (corpus.texts[part][0] for part in ("validation", "train"))
    assert held.words + kept.words == pytest.approx(100 * repeats, rel=1e-3)  # a cut may go through a word
    assert isinstance(kept.tokens.base, np.memmap)


def test_the_stages_are_reported(tmp_path: Path) -> None:
    recipe = load_any_recipe("translation/numbers", (*SMALL, *BY_TASK["translation"], *files(tmp_path, "translation")))
    told: list[tuple[str, int, int]] = []
    load_corpus(recipe, tmp_path, tmp_path / "packed", lambda *how: told.append(how))
    assert told == [("tokenizing train", 95, 95), ("tokenizing validation", 5, 5)]


def test_a_model_from_a_folder_keeps_its_tokenizer(tmp_path: Path) -> None:
    _, learned = small("language", tmp_path)
    (tmp_path / "network").mkdir()
    named = (f"model.name=hf:{tmp_path / 'network'}", "data.vocabulary=280")
    _, without = small("language", tmp_path, *named)
    assert len(without.tokenizer) <= 280 < len(learned.tokenizer)
    learned.tokenizer.save_pretrained(tmp_path / "network")
    _, found = small("language", tmp_path, *named)
    assert found.tokenizer.get_vocab() == learned.tokenizer.get_vocab()
    assert (found.texts["train"][0].tokens == learned.texts["train"][0].tokens).all()
    learned.tokenizer.eos_token = None
    learned.tokenizer.save_pretrained(tmp_path / "network")
    with pytest.raises(ValueError, match="has neither eos_token nor sep_token to end a text with; give it one"):
        small("language", tmp_path, *named)


def test_a_tokenizer_without_the_tokens_of_a_masked_model_says_which(tmp_path: Path) -> None:
    _, learned = small("masked", tmp_path)
    learned.tokenizer.cls_token = learned.tokenizer.mask_token = None
    learned.tokenizer.save_pretrained(tmp_path / "network")
    with pytest.raises(ValueError, match="has no cls_token and no mask_token, which masked language models need"):
        small("masked", tmp_path, f"model.name=hf:{tmp_path / 'network'}")


@pytest.mark.parametrize("name", ["squad/small", "translation/numbers"])
def test_the_checksum_of_a_text_is_known_without_tokenizing_it(tmp_path: Path, name: str) -> None:
    recipe: Any = recipe_of() if name == "squad/small" else load_any_recipe(name)
    folder = write_squad(tmp_path / "squad") if name == "squad/small" else None
    checksum = corpus_checksum(recipe, folder)
    assert checksum == load_corpus(recipe, folder, tmp_path / "cache").checksum


def test_a_tokenizer_is_learned_again_for_another_case_and_for_other_word_pieces(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("\n\n".join(["One TWO three"] * 40))
    pieces = tmp_path / "pieces.txt"

    def tokens_of(vocabulary: str | int, lower: bool) -> list[str]:
        changes = ('data.train=["train.txt"]', f"data.vocabulary={vocabulary}", f"data.lower={str(lower).lower()}")
        recipe: Any = load_any_recipe("bert/tiny", (*SMALL, "data.length=16", "run.batch=4", *changes))
        corpus = load_corpus(recipe, tmp_path, tmp_path / "packed")
        return corpus.tokenizer.convert_ids_to_tokens(corpus.texts["train"][0][0])[:-1]

    assert tokens_of(40, lower=False)[0].startswith("O")
    assert tokens_of(40, lower=True)[0].startswith("o")
    for word in ("one", "two"):
        pieces.write_text("\n".join([*BERT.values(), word]))
        expected = [piece if piece == word else BERT["unk_token"] for piece in ("one", "two", "three")]
        assert tokens_of('"pieces.txt"', lower=True) == expected


def test_a_question_that_is_there_twice_is_named_with_its_part(tmp_path: Path) -> None:
    folder = write_squad(tmp_path)
    (folder / "dev.json").write_text(json.dumps(table(paragraph(1), paragraph(1))))
    with pytest.raises(ValueError, match=r"question 'p1q0' is twice in the validation data"):
        load_corpus(recipe_of(), folder, tmp_path / "cache")
